"""One posted transfer and the two flags that decide who ends it."""

from __future__ import annotations

import threading

from kvtransport.backend import Op
from kvtransport.errors import TransferCancelledError
from kvtransport_backends.host._plan import Plan


class Job:
    """Exactly one of ``begin`` (a lane) and ``cancel`` (a caller) wins."""

    __slots__ = ("_lock", "_taken", "cancelled", "notify", "op", "plan", "ticket")

    def __init__(self, ticket: int, op: Op, plan: Plan, notify: bytes | None) -> None:
        self.ticket = ticket
        self.op = op
        self.plan = plan
        self.notify = notify
        self.cancelled = False
        self._taken = False
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Claim the job for running; False when it was cancelled before."""
        with self._lock:
            first = not self._taken
            self._taken = True
            return first

    def cancel(self) -> bool:
        """Ask for an early end; True when the job had not begun and never will."""
        self.cancelled = True
        return self.begin()

    def check(self) -> None:
        """Raise ``TransferCancelledError`` once ``cancel`` was called."""
        if self.cancelled:
            raise cancelled_error(self.ticket)


def cancelled_error(ticket: int) -> TransferCancelledError:
    """What a cancelled transfer's completion carries."""
    return TransferCancelledError("cancelled", backend="host", transfer_id=ticket)
