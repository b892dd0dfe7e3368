"""Ask a running engine's control plane what it holds, for people and scripts."""

from __future__ import annotations

import time
from typing import Any, Self

import msgspec
import zmq

from kvtransport.errors import HandshakeTimeoutError, ProtocolError
from kvtransport.lease import protocol
from kvtransport.lease.address import parse_address
from kvtransport.lease.link import dealer
from kvtransport.lease.security import ClusterSecret


class StatusClient:
    """One connection to one engine; a context manager.  One thread at a time."""

    def __init__(self, address: str, secret: ClusterSecret | None) -> None:
        """Raises ``ConfigError`` when ``address`` is none; connects in the background."""
        self.address = str(parse_address(address, "ADDRESS"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, self.address, secret.curve_keys() if secret else None)
        self._serial = 0

    def fetch(self, timeout_s: float) -> dict[str, Any]:
        """The engine's status as plain values.

        Raises ``HandshakeTimeoutError`` when nothing answers in time (nobody
        there, or another cluster secret: the two look the same from outside)
        and ``ProtocolError`` when the answer is no status.
        """
        self._serial += 1
        until = time.monotonic() + timeout_s
        self._await(zmq.POLLOUT, until, timeout_s)  # writable once it is connected
        self._socket.send(protocol.encode(protocol.StatusRequest(self._serial)))
        while True:
            self._await(zmq.POLLIN, until, timeout_s)
            message = protocol.decode_to_reader(self._socket.recv())
            if isinstance(message, protocol.Error):
                raise ProtocolError(f"{self.address} refused: {message.message}")
            if isinstance(message, protocol.StatusReply) and message.request_id == self._serial:
                status: dict[str, Any] = msgspec.json.decode(message.body)
                return status

    def _await(self, event: int, until: float, timeout_s: float) -> None:
        left_s = max(0.0, until - time.monotonic())
        if not self._socket.poll(int(left_s * 1000), event):
            raise HandshakeTimeoutError(
                f"no answer from {self.address} in {timeout_s:g} s: is an engine's control"
                " plane there, and has it the same cluster secret?"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close(0)
        self._context.term()
