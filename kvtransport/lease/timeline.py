"""A queue of due times whose entries can be taken out again."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Expiring(Protocol):
    """Anything that is due at ``expires_s``.  ``timer`` belongs to its timeline; 0: in none."""

    expires_s: float
    timer: int


E = TypeVar("E", bound=Expiring)


class Timeline(Generic[E]):
    """Entries in order of ``expires_s``; each may be in one timeline at a time.

    Removal is lazy; the heap is rebuilt when most of it is stale, so it stays
    within twice the live entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._live = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._live

    def add(self, entry: E) -> None:
        """Queue the entry; when it is queued already, for its new time instead."""
        self._live += not entry.timer
        self._serial = entry.timer = self._serial + 1
        heapq.heappush(self._heap, (entry.expires_s, entry.timer, entry))
        if len(self._heap) > 64 and len(self._heap) > 2 * self._live:
            self._heap = [item for item in self._heap if item[2].timer == item[1]]
            heapq.heapify(self._heap)

    def discard(self, entry: E) -> None:
        """Take the entry out if it is queued."""
        if entry.timer:
            entry.timer = 0
            self._live -= 1

    def due(self, now: float) -> E | None:
        """Take out the earliest entry whose time has come."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, timer, entry = heapq.heappop(heap)
            if entry.timer == timer:
                entry.timer = 0
                self._live -= 1
                return entry
        return None
