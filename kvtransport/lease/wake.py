"""Wakes a poller from other threads."""

from __future__ import annotations

import socket
from contextlib import suppress


class Wake:
    """A socket pair: ``set`` from any thread makes ``fileno`` readable."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._pending = False

    def fileno(self) -> int:
        return self._read.fileno()

    def set(self) -> None:
        if self._pending:
            return
        self._pending = True
        # Full means that plenty of wake-ups are on their way; closed, that nobody listens.
        with suppress(BlockingIOError, OSError):
            self._write.send(b"\0")

    def clear(self) -> None:
        """Call before looking for work: what comes later wakes again."""
        with suppress(BlockingIOError):
            self._read.recv(4096)
        self._pending = False

    def close(self) -> None:
        self._read.close()
        self._write.close()
