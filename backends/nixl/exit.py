"""Closing an agent at interpreter exit when its owner forgot to.

NIXL's threads and static destructors must not outlive the interpreter's own
teardown, or the process ends with a segmentation fault.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Closable(Protocol):
    """What can be closed at exit."""

    def close_at_exit(self) -> None: ...


class AtExit:
    """Calls ``target.close_at_exit()`` while armed; keeps no strong reference."""

    def __init__(self, target: Closable) -> None:
        self._target = weakref.ref(target)

    def arm(self) -> None:
        atexit.register(self._run)

    def disarm(self) -> None:
        atexit.unregister(self._run)

    def _run(self) -> None:
        target = self._target()
        if target is not None:
            target.close_at_exit()
