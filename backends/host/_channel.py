"""A connection to the thread that serves one peer."""

from __future__ import annotations

import socket
import time

from kvtransport.errors import HandshakeTimeoutError, KVTransportError, PeerLostError
from kvtransport_backends.host._body import Body
from kvtransport_backends.host._handshake import Credentials, call
from kvtransport_backends.host._plan import Plan
from kvtransport_backends.host._stream import Stream, tune
from kvtransport_backends.host._vectors import Vectors
from kvtransport_backends.host._wire import (
    Descriptors,
    Head,
    Request,
    Status,
    raise_for,
)
from kvtransport_backends.host.config import HostConfig, split_address


class Channel:
    """Requests and answers, one at a time; used by one thread.

    After any exception the channel is out of step: close it.
    """

    def __init__(self, stream: Stream, *, can_pull: bool, must_pull: bool) -> None:
        self.stream = stream
        self.can_pull = can_pull
        self._must_pull = must_pull

    def close(self) -> None:
        self.stream.close()

    def read(self, plan: Plan) -> None:
        """Fill the plan's local memory with the peer's bytes.

        Raises the peer's refusal, ``ConnectionError`` or ``TimeoutError``.
        """
        for rows, vectors in plan.batches():
            self._ask(Request.READ, rows, vectors.total)
            raise_for(self._status())
            self.stream.receive_vectors(vectors)
            raise_for(self._status())

    def write(self, rows: Descriptors, vectors: Vectors) -> None:
        """Have the peer store one batch; raises as ``read`` does."""
        if self.can_pull:
            self._ask(Request.PULL, rows, vectors.total)
            status = self._status()
            if status != Status.CANNOT_PULL or self._must_pull:
                raise_for(status)
                return
            self.can_pull = False
        self._ask(Request.WRITE, rows, vectors.total)
        self.stream.send_vectors(vectors)
        raise_for(self._status())

    def notify(self, payload: bytes) -> None:
        """Deliver one notification; raises as ``read`` does."""
        self.stream.send(Head(Request.NOTIFY, 0, len(payload)).encode() + payload)
        raise_for(self._status())

    def _ask(self, request: Request, rows: Descriptors, nbytes: int) -> None:
        self.stream.send(Head(request, len(rows), nbytes).encode() + rows.tobytes())

    def _status(self) -> int:
        return self.stream.receive(1)[0]


def connect(body: Body, own: Credentials, config: HostConfig, *, try_local: bool) -> Channel:
    """Reach the peer's serving thread: its local socket first, if that may work.

    Raises ``HandshakeTimeoutError`` or ``PeerLostError``.
    """
    if body.vm and try_local:
        try:
            return _open(socket.AF_UNIX, b"\0" + body.vm.socket_name, body, own, config)
        except KVTransportError:
            # Another network namespace; an explicit vm path has nothing else.
            if config.path == "vm" or not body.address:
                raise
    if not body.address:
        raise PeerLostError("the peer serves no TCP: its option path is vm", backend="host")
    host, port = split_address(body.address, "the peer's address")
    return _open(socket.AF_INET, (host, port), body, own, config)


def _open(
    family: int,
    address: bytes | tuple[str, int],
    body: Body,
    own: Credentials,
    config: HostConfig,
) -> Channel:
    end = time.monotonic() + config.handshake_timeout_s
    sock = _connected(family, address, config.handshake_timeout_s)
    try:
        call(sock, own, body.token, max(end - time.monotonic(), 0.001))
        tune(sock, config.stall_timeout_s)
        stream = Stream(sock, config.stall_timeout_s, config.chunk_bytes)
    except BaseException:
        sock.close()
        raise
    return Channel(stream, can_pull=family == socket.AF_UNIX, must_pull=config.path == "vm")


def _connected(family: int, address: bytes | tuple[str, int], timeout_s: float) -> socket.socket:
    try:
        if isinstance(address, tuple):
            return socket.create_connection(address, timeout_s)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise HandshakeTimeoutError(
            f"connecting to {_show(address)} took longer than {timeout_s:g} s", backend="host"
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"cannot connect to {_show(address)}: {error.strerror or error}",
            backend="host",
            native=error,
        ) from error
    return sock


def _show(address: bytes | tuple[str, int]) -> str:
    if isinstance(address, tuple):
        return f"{address[0]} port {address[1]}"
    return f"local socket @{address[1:].decode('ascii', 'replace')}"
