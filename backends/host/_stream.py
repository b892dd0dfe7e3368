"""Bytes and scatter lists over a connected socket, never waiting without a bound."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np

from kvtransport_backends.host import _sys
from kvtransport_backends.host._vectors import Vectors

_SLICE_MS = 100
_SCRATCH_BYTES = 1024 * 1024

Using = Callable[[], AbstractContextManager[None]]


class Stream:
    """One socket, used by one thread; ``wake`` may be called by any.

    ``between`` is called before every wait slice and may raise to abandon what
    is going on.  Every method raises ``ConnectionError`` when the other side is
    gone and ``TimeoutError`` when no byte moved for ``stall_timeout_s``; the
    stream is out of step then and must be closed.
    """

    def __init__(self, sock: socket.socket, stall_timeout_s: float, chunk_bytes: int) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._closing = threading.Lock()
        self.between: Callable[[], None] = _nothing
        self._stall_timeout_s = stall_timeout_s
        self._chunk_bytes = chunk_bytes
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def close(self) -> None:
        """Only for the thread that uses the stream: the descriptor is freed."""
        with self._closing:
            self.socket.close()

    def abandon(self) -> None:
        """As ``close``, in a forked child, where the lock may never be free."""
        self.socket.close()

    def wake(self) -> None:
        """Make the thread that uses the stream look at ``between`` soon.

        Only reading is ended: the other side must not see an end before our
        thread has made its last copy and closes the socket itself.
        """
        # The lock keeps this from reaching whatever gets the number after ``close``.
        with self._closing, suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether something (or the end) arrived within ``timeout_s``."""
        return bool(self._readable.poll(timeout_s * 1000))

    def end_writing(self) -> None:
        """Let the other side see our end after what was sent already."""
        with suppress(OSError):  # gone already, which reading shows
            self.socket.shutdown(socket.SHUT_WR)

    def receive_some(self, timeout_s: float) -> bytes | None:
        """What arrived within ``timeout_s``: bytes, b"" at the end, None for nothing."""
        if not self.wait_readable(timeout_s):
            return None
        try:
            return self.socket.recv(_SCRATCH_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _wait(self, poller: select.poll) -> None:
        end = time.monotonic() + self._stall_timeout_s
        while True:
            self.between()
            if poller.poll(_SLICE_MS):
                return
            if time.monotonic() >= end:
                raise TimeoutError(f"no byte moved for {self._stall_timeout_s:g} s")

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                self._wait(self._writable)

    def receive(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                got = self.socket.recv_into(view)
            except BlockingIOError:
                self._wait(self._readable)
                continue
            if not got:
                raise ConnectionResetError("the connection was closed")
            view = view[got:]
        return data

    def send_vectors(self, vectors: Vectors, using: Using = nullcontext) -> None:
        """Send all of ``vectors``; each copy into the socket happens in ``using``."""
        fd = self.socket.fileno()
        while vectors.remaining:
            self.between()
            try:
                with using():
                    vectors.advance(_sys.send_vectors(fd, *vectors.window(self._chunk_bytes)))
            except BlockingIOError:
                self._wait(self._writable)

    def receive_vectors(self, vectors: Vectors, using: Using = nullcontext) -> None:
        """Fill all of ``vectors``; each copy out of the socket happens in ``using``."""
        fd = self.socket.fileno()
        while vectors.remaining:
            self.between()
            try:
                with using():
                    got = _sys.receive_vectors(fd, *vectors.window(self._chunk_bytes))
            except BlockingIOError:
                self._wait(self._readable)
                continue
            if not got:
                raise ConnectionResetError("the connection was closed")
            vectors.advance(got)

    def send_zeros(self, nbytes: int) -> None:
        """Keep the stream in step after the data to send is gone."""
        zeros = bytes(min(nbytes, _SCRATCH_BYTES))
        for start in range(0, nbytes, _SCRATCH_BYTES):
            self.send(zeros[: nbytes - start])

    def discard(self, nbytes: int) -> None:
        """Keep the stream in step when the data has nowhere to go."""
        if nbytes:
            scratch = np.empty(min(nbytes, _SCRATCH_BYTES), np.uint8)
            lengths = np.full(-(-nbytes // len(scratch)), len(scratch), np.uint64)
            lengths[-1] = nbytes - len(scratch) * (len(lengths) - 1)
            addresses = np.full(len(lengths), scratch.ctypes.data, np.uint64)
            self.receive_vectors(Vectors(addresses, lengths))


def _nothing() -> None:
    """The default ``between``."""


def tune(sock: socket.socket, idle_s: float) -> None:
    """Send small frames at once, and find out about a host that vanished."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(idle_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(idle_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
