"""A queue of due times whose entries can be taken out again."""

from __future__ import annotations

import heapq
import math
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
        self.next_s = math.inf
        """Nothing is due before; there may be nothing even then."""
        # The heap does not hold the entries: pairs of numbers are nothing that
        # the garbage collector would visit again and again.
        self._heap: list[tuple[float, int]] = []
        self._entries: dict[int, E] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: E) -> None:
        """Queue the entry; when it is queued already, for its new time instead."""
        entries, heap = self._entries, self._heap
        if entry.timer:
            del entries[entry.timer]
        self._serial = timer = entry.timer = self._serial + 1
        entries[timer] = entry
        heapq.heappush(heap, (entry.expires_s, timer))
        self.next_s = min(self.next_s, entry.expires_s)
        if len(heap) > 64 and len(heap) > 2 * len(entries):
            self._heap = [item for item in heap if item[1] in entries]
            heapq.heapify(self._heap)

    def discard(self, entry: E) -> None:
        """Take the entry out if it is queued."""
        if entry.timer:
            del self._entries[entry.timer]
            entry.timer = 0

    def due(self, now: float) -> E | None:
        """Take out the earliest entry whose time has come."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = self._entries.pop(heapq.heappop(heap)[1], None)
            if entry is not None:
                entry.timer = 0
                return entry
        self.next_s = heap[0][0] if heap else math.inf
        return None
