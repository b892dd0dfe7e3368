"""Prepared descriptor tables: the cheap way to name many blocks to NIXL.

Making a transfer from a list costs NIXL about 6 us and 0.2 us per descriptor,
because it looks up the registration of each; from two prepared tables and
index vectors it costs 0.5 us and 0.03 us.  A table covers every region of one
memory kind with rows of one block size (``unit``), so it serves any transfer
whose descriptors are multiples of it, which KV blocks are.

A table holds pointers into NIXL's registrations.  It must not outlive a change
of the regions it covers, hence the versions.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransport_backends.nixl.driver import Driver, NativeAgent
from kvtransport_backends.nixl.regions import Placed, RegionBook

_MAX_UNITS = 16
_MAX_ROWS = (1 << 31) - 1

Indices = NDArray[np.int32]


@dataclass(slots=True)
class Table:
    """One prepared table; ``first`` maps a region id to its first row."""

    handle: int
    version: int
    unit: int
    first: dict[int, int]

    def rows(
        self,
        regions: NDArray[np.int64],
        offsets: NDArray[np.uint64],
        found: tuple[Placed, ...],
    ) -> Indices:
        """The rows of blocks at ``offsets``; ``found`` are the regions that occur."""
        if len(offsets) == 1:
            row = int(offsets[0]) // self.unit + self.first[found[0].region_id]
            return np.array([row], np.int32)
        rows = (offsets // np.uint64(self.unit)).astype(np.int32)
        if len(found) == 1:
            rows += np.int32(self.first[found[0].region_id])
            return rows
        where = np.searchsorted([placed.region_id for placed in found], regions)
        rows += np.array([self.first[placed.region_id] for placed in found], np.int32)[where]
        return rows


class Tables:
    """The tables of one side: local (``name`` is "") or one peer's."""

    def __init__(self, driver: Driver, agent: NativeAgent, backend: int, name: str) -> None:
        self._driver = driver
        self._agent = agent
        self._backend = backend
        self._name = name
        self._tables: OrderedDict[tuple[str, int], Table] = OrderedDict()

    def get(self, book: RegionBook, kind: str, unit: int) -> Table | None:
        """The table for blocks of ``unit`` bytes, or None if it would be too long.

        Raises NIXL's exceptions.
        """
        key = (kind, unit)
        table = self._tables.get(key)
        if table is not None and table.version == book.version:
            return table
        if table is not None:
            self.clear()  # the regions changed, so every table is out of date
        table = self._build(book, kind, unit)
        if table is not None:
            self._tables[key] = table
            if len(self._tables) > _MAX_UNITS:
                _, oldest = self._tables.popitem(last=False)
                self._agent.releasedDlistH(oldest.handle)
        return table

    def clear(self) -> None:
        """Release every table; must run before a region it covers is deregistered."""
        while self._tables:
            _, table = self._tables.popitem()
            self._agent.releasedDlistH(table.handle)

    def _build(self, book: RegionBook, kind: str, unit: int) -> Table | None:
        rows: list[tuple[int, int, int, int, int]] = []
        first: dict[int, int] = {}
        total = 0
        for placed in book:
            count = placed.nbytes // unit
            if placed.kind != kind or not count:
                continue
            rows.append((placed.address, unit, placed.device_id, unit, count))
            first[placed.region_id] = total
            total += count
        if total > _MAX_ROWS:
            return None
        handle = self._agent.prepXferDlist(
            self._name, self._driver.segment(kind), np.array(rows, np.uint64), [self._backend]
        )
        return Table(handle, book.version, unit, first)


class UnitHistory:
    """Remembers block sizes, so that a table is only built for one that returns."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def returning(self, unit: int) -> bool:
        if unit in self._seen:
            return True
        self._seen[unit] = None
        if len(self._seen) > 4 * _MAX_UNITS:
            self._seen.popitem(last=False)
        return False


def expand(rows: Indices, counts: NDArray[np.int64]) -> Indices:
    """Index ``rows[i], rows[i] + 1, ...``, ``counts[i]`` of them, for every i."""
    first = np.cumsum(counts) - counts
    steps = np.arange(int(counts.sum())) - np.repeat(first, counts)
    return (np.repeat(rows, counts) + steps).astype(np.int32)
