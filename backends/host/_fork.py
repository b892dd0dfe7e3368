"""A forked child must not keep our connections open.

The kernel ends a connection when its last holder closes it.  A child that
inherited the descriptors would hide the death of its parent from every peer.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Abandonable(Protocol):
    """Something whose descriptors a forked child closes."""

    def abandon(self) -> None:
        """Close descriptors; no thread and no lock of the parent exists here."""


_live: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def close_in_child(holder: Abandonable) -> None:
    """Call ``holder.abandon`` in every child forked while ``holder`` lives."""
    _live.add(holder)


def forget(holder: Abandonable) -> None:
    """Undo ``close_in_child``."""
    _live.discard(holder)


def _after_fork_in_child() -> None:
    for holder in list(_live):
        holder.abandon()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
