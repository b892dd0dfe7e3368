"""Accepting connections, and keeping strangers from harming the invited.

One thread runs every handshake at once.  Those who have not proved the token
are few (the oldest is dropped), short-lived and cost no thread; only then does
a connection get a thread of its own.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransport_backends.host._counters import Counters
from kvtransport_backends.host._handshake import (
    REPLY_BYTES,
    Caller,
    Credentials,
    ServerHandshake,
)
from kvtransport_backends.host._wake import Wake

_log = logging.getLogger("kvtransport.backends.host")

_MAX_PENDING = 64
_BACKLOG = 256
_SLICE_S = 0.5
_NO_DESCRIPTORS_PAUSE_S = 0.05

OnCaller = Callable[[socket.socket, Caller, int], bool]
"""Takes the socket over (True) or leaves it to be closed; the int is a pid or 0."""


@dataclass(slots=True, eq=False)
class _Pending:
    sock: socket.socket
    handshake: ServerHandshake
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts on ``sockets`` (which it owns) until ``stop``."""

    def __init__(
        self,
        sockets: list[socket.socket],
        own: Credentials,
        timeout_s: float,
        on_caller: OnCaller,
        counters: Counters,
    ) -> None:
        self._own = own
        self._counters = counters
        self._starved = False
        self._timeout_s = timeout_s
        self._on_caller = on_caller
        self._sockets = sockets
        self._pending: dict[socket.socket, _Pending] = {}
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for sock in sockets:
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvt-host-listen", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop accepting; returns whether the thread ended in time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Let go of every descriptor; all that a forked child may do."""
        self._wake.abandon()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in [*self._pending, *self._sockets]:
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(_SLICE_S):
                    self._ready(key.fileobj)
                self._expire()
        finally:
            self._close_sockets()
            self._wake.close()

    def _ready(self, source: object) -> None:
        if not isinstance(source, socket.socket):
            return  # woken by stop
        pending = self._pending.get(source)
        if pending:
            self._read(pending)
        elif source in self._sockets:
            self._accept(source)

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Out of descriptors: the caller stays queued, so do not spin on it.
            if not self._starved:
                _log.warning("host backend cannot accept connections: %s", error)
            self._starved = True
            time.sleep(_NO_DESCRIPTORS_PAUSE_S)
            return
        self._starved = False
        sock.setblocking(False)
        handshake = ServerHandshake(self._own)
        try:
            sock.send(handshake.greeting())
        except OSError:
            sock.close()
            return
        if len(self._pending) >= _MAX_PENDING:
            self._drop(next(iter(self._pending.values())))
        self._pending[sock] = _Pending(sock, handshake, time.monotonic() + self._timeout_s)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, pending: _Pending) -> None:
        try:
            data = pending.sock.recv(REPLY_BYTES - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(pending)
            return
        pending.received += data
        if len(pending.received) == REPLY_BYTES:
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        self._forget(pending)
        accepted = pending.handshake.accept(bytes(pending.received))
        if accepted is None:
            # Not a warning: strangers must not be able to fill the log.
            _log.debug("host backend refused a connection: it does not prove this agent's token")
            self._counters.add("connections_refused")
            pending.sock.close()
            return
        caller, answer = accepted
        try:
            pending.sock.send(answer)
            taken = self._on_caller(pending.sock, caller, _caller_pid(pending.sock))
        except OSError:
            taken = False
        if not taken:
            pending.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for pending in [one for one in self._pending.values() if one.deadline <= now]:
            self._drop(pending)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock]


def _caller_pid(sock: socket.socket) -> int:
    """The process that connected, according to the kernel; 0 over TCP."""
    if sock.family != socket.AF_UNIX:
        return 0
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])
