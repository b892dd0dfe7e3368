"""Whether an agent may be used now, by this thread and in this process."""

from __future__ import annotations

import os
import threading
from typing import Literal

from kvtransport.errors import ClosedError, ForkError, UnsupportedError

_forks = 0
"""How many forks lie between the first process and this one."""


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  # one number per process is what is meant
    _forks += 1


# Counting forks is an integer comparison per call; asking for the pid is a system
# call, and a noticeable part of what the core adds to a small transfer.
os.register_at_fork(after_in_child=_count_fork)


class Gate:
    """State of an agent; every public method passes through ``check``."""

    __slots__ = ("_forks", "_name", "_thread", "state")

    def __init__(self, name: str, *, one_thread: bool) -> None:
        self._name = name
        self._forks = _forks
        self._thread = threading.get_ident() if one_thread else None
        self.state: Literal["open", "closing", "closed"] = "closed"

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the agent."""
        return self._forks != _forks

    def check(self) -> None:
        """Raise ``ForkError``, ``ClosedError`` or, for the wrong thread, ``UnsupportedError``."""
        if self._forks != _forks or self._thread is not None:
            self.check_process()
        if self.state != "open":
            raise ClosedError(f"agent {self._name!r} is {self.state}")

    def check_process(self) -> None:
        """As ``check``, for what may go on while the agent closes."""
        self.check_fork()
        if self._thread is not None and self._thread != threading.get_ident():
            raise UnsupportedError(
                "this backend must be used from the thread that opened it", capability="threading"
            )

    def check_fork(self) -> None:
        """Raise ``ForkError`` in a child process; call it before taking any lock."""
        if self._forks != _forks:
            raise ForkError(
                f"agent {self._name!r} was opened before this process was forked; open one here"
            )
