"""A queue of due times whose entries can be taken out again."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Expiring(Protocol):
    """Anything that is due at ``expires_s``."""

    expires_s: float


E = TypeVar("E", bound=Expiring)


class Timeline(Generic[E]):
    """Entries in order of ``expires_s``.

    An entry may be added again with a later time.  Removal is lazy; the heap is
    rebuilt when most of it is stale, so it stays within twice the live entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._live: dict[int, E] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, expires_s: float, entry: E) -> None:
        self._serial += 1
        self._live[id(entry)] = entry
        heapq.heappush(self._heap, (expires_s, self._serial, entry))
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._live):
            self._rebuild()

    def discard(self, entry: E) -> None:
        self._live.pop(id(entry), None)

    def due(self, now: float) -> E | None:
        """Take out the earliest entry whose time has come."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, entry = heapq.heappop(heap)
            if entry.expires_s == at and id(entry) in self._live:
                del self._live[id(entry)]
                return entry
        return None

    def next_s(self) -> float | None:
        """When the earliest entry is due, perhaps too early; ``None`` when empty."""
        return self._heap[0][0] if self._live else None

    def _rebuild(self) -> None:
        self._serial = 0
        self._heap = []
        for entry in self._live.values():
            self._serial += 1
            self._heap.append((entry.expires_s, self._serial, entry))
        heapq.heapify(self._heap)
