"""Knowing that a peer process has ended, on fabrics that do not tell.

Architecture
    A ``Liveness`` listens on a TCP port (the *beacon*) and connects to its
    peers' beacons (*lifelines*).  No data is exchanged beyond the token by
    which a lifeline knows that it reached the right process and not another
    one that was given the same port.  When a process ends, its kernel closes
    the connection; keepalive covers hosts that disappear.

Threading
    The beacon accepts in a thread of its own, so that a process that computes
    for seconds still answers.  The other methods are called one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import select
import socket
import struct
import threading
import time

from kvtransport.errors import (
    ConfigError,
    HandshakeTimeoutError,
    MalformedMetadataError,
    PeerLostError,
)

_log = logging.getLogger("kvtransport.nixl")

DETECTION_BOUND_S = 10.0
"""When the loss of a whole host is noticed at the latest; a process's is at once."""

_TOKEN = 16
_GOODBYE = b"\x00"
_MAX_LIFELINES = 4096
_MAX_ENDPOINTS = 32
_SIOCGIFADDR = 0x8915


def split_endpoint(text: str, option: str) -> tuple[str, int]:
    """Split ``host:port`` or ``host``; raises ``ConfigError`` naming ``option``."""
    host, _, port = text.partition(":")
    try:
        socket.inet_pton(socket.AF_INET, host)
        number = int(port or "0")
    except (OSError, ValueError):
        number = -1
    if not 0 <= number <= 65535:
        raise ConfigError(f"{option} must be an IPv4 address with or without :port, not {text!r}")
    return host, number


class Beacon:
    """Accepts lifelines and holds them open until it is closed."""

    def __init__(self, listen: str) -> None:
        host, port = split_endpoint(listen, "liveness")
        self._token = secrets.token_bytes(_TOKEN)
        self._server = socket.create_server((host, port), backlog=1024)
        self._held: dict[int, socket.socket] = {}
        self._stop_read, self._stop_write = socket.socketpair()
        bound = self._server.getsockname()[1]
        hosts = _own_addresses() if host == "0.0.0.0" else [host]  # noqa: S104
        self.contact = f"{self._token.hex()}@{','.join(f'{one}:{bound}' for one in hosts)}"
        self._thread = threading.Thread(target=self._run, name="kvt-beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye to the watchers and let go of them."""
        self._stop_write.close()
        self._thread.join(2.0)
        for lifeline in self._held.values():
            with contextlib.suppress(OSError):  # it is gone already
                lifeline.send(_GOODBYE)
        for one in (self._server, self._stop_read, *self._held.values()):
            one.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._server, select.POLLIN)
        poller.register(self._stop_read, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._stop_read.fileno():
                    return
                if fd == self._server.fileno():
                    self._accept(poller)
                else:  # the reader is gone, or sends what nobody asked for
                    poller.unregister(fd)
                    self._held.pop(fd).close()

    def _accept(self, poller: select.poll) -> None:
        with contextlib.suppress(OSError):  # a reader that left at once
            lifeline, _ = self._server.accept()
            if len(self._held) >= _MAX_LIFELINES:
                lifeline.close()
                return
            lifeline.setblocking(False)
            lifeline.send(self._token)
            self._held[lifeline.fileno()] = lifeline
            poller.register(lifeline, select.POLLIN)


class Liveness:
    """Our beacon, if any, and the lifelines to peers' beacons."""

    def __init__(self, listen: str, timeout_s: float) -> None:
        self._beacon = Beacon(listen) if listen else None
        self._timeout_s = timeout_s
        self._poller = select.poll()
        self._lifelines: dict[int, tuple[str, socket.socket]] = {}

    @property
    def contact(self) -> str:
        """What peers need to watch us; empty without a beacon."""
        return self._beacon.contact if self._beacon is not None else ""

    def watch(self, name: str, contact: str) -> None:
        """Hold a lifeline to a peer; nothing happens when it has no beacon.

        Raises ``PeerLostError`` when nobody or another process answers,
        ``HandshakeTimeoutError`` when its addresses cannot be reached in time.
        """
        watched = {watched for watched, _ in self._lifelines.values()}
        if not contact or name in watched:
            return
        token, endpoints = _parse(contact)
        lifeline = _connect(token, endpoints, self._timeout_s)
        self._lifelines[lifeline.fileno()] = (name, lifeline)
        self._poller.register(lifeline, select.POLLIN)

    def ended(self) -> list[tuple[str, bool]]:
        """The peers that have ended since the last call; never blocks.

        With each name comes whether the peer said goodbye, which one that
        closes its agent does and one that dies does not.
        """
        if not self._lifelines:
            return []
        return [self._end(fd) for fd, _ in self._poller.poll(0)]

    def forget(self, name: str) -> None:
        for fd, (watched, _) in list(self._lifelines.items()):
            if watched == name:
                self._cut(fd)

    def close(self) -> None:
        for fd in list(self._lifelines):
            self._cut(fd)
        if self._beacon is not None:
            self._beacon.close()

    def _end(self, fd: int) -> tuple[str, bool]:
        try:
            polite = self._lifelines[fd][1].recv(1) == _GOODBYE
        except OSError:
            polite = False
        return self._cut(fd), polite

    def _cut(self, fd: int) -> str:
        name, lifeline = self._lifelines.pop(fd)
        self._poller.unregister(fd)
        lifeline.close()
        return name


def _parse(contact: str) -> tuple[bytes, list[tuple[str, int]]]:
    """Take a peer's contact apart; raises ``MalformedMetadataError``."""
    token, _, endpoints = contact.partition("@")
    try:
        found = [split_endpoint(one, "contact") for one in endpoints.split(",")]
        secret = bytes.fromhex(token)
    except (ConfigError, ValueError) as error:
        raise MalformedMetadataError(f"the peer's contact is malformed: {error}") from error
    if len(secret) != _TOKEN or len(found) > _MAX_ENDPOINTS:
        raise MalformedMetadataError("the peer's contact has a wrong token or too many addresses")
    return secret, found


def _connect(token: bytes, endpoints: list[tuple[str, int]], timeout_s: float) -> socket.socket:
    """A lifeline over the first of the peer's addresses that answers with its token."""
    until = time.monotonic() + timeout_s
    refused = 0
    shown = ", ".join(f"{host} port {port}" for host, port in endpoints)
    for endpoint in endpoints:
        left = until - time.monotonic()
        if endpoint != endpoints[-1]:
            left /= 2  # an address that cannot be reached leaves time for the others
        try:
            lifeline = socket.create_connection(endpoint, timeout=max(0.05, left))
        except ConnectionRefusedError:
            refused += 1
            continue
        except OSError:
            continue
        if _greeted(lifeline, token, until):
            _keep_alive(lifeline)
            return lifeline
        lifeline.close()
        refused += 1
    if refused:
        raise PeerLostError(f"the peer has ended: nobody answers at {shown}")
    raise HandshakeTimeoutError(
        f"the peer's {shown} cannot be reached within {timeout_s} s;"
        " open that port, or set liveness to an address of the peer's that can"
    )


def _greeted(lifeline: socket.socket, token: bytes, until: float) -> bool:
    received = b""
    try:
        while len(received) < len(token):
            lifeline.settimeout(max(0.05, until - time.monotonic()))
            chunk = lifeline.recv(len(token) - len(received))
            if not chunk:
                return False
            received += chunk
    except OSError:
        return False
    return secrets.compare_digest(received, token)


def _keep_alive(lifeline: socket.socket) -> None:
    lifeline.setblocking(False)
    lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 4),
    ):
        lifeline.setsockopt(socket.IPPROTO_TCP, option, seconds)


def _own_addresses() -> list[str]:
    """This host's IPv4 addresses, loopback only if there is no other."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    routable = [address for address in found if not address.startswith("127.")]
    return routable[:_MAX_ENDPOINTS] or ["127.0.0.1"]
