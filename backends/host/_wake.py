"""Waking a thread that sleeps in ``poll``."""

from __future__ import annotations

import os
import threading


class Wake:
    """A descriptor that becomes readable by ``set``; harmless after ``close``.

    The lock keeps ``set`` from writing to a number that meanwhile belongs to
    another file.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.fd

    def set(self) -> None:
        """Wake the sleeper; any thread."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Only the sleeper, after ``poll`` said that it is readable."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Only the sleeper, at its end."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """As ``close``, in a forked child, where the lock may never be free."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
