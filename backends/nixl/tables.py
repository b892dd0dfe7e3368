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

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks
from kvtransport.errors import StaleDescriptorError
from kvtransport_backends.nixl.driver import Driver, NativeAgent
from kvtransport_backends.nixl.regions import RegionBook

MIN_UNIT = 512
_MAX_UNITS = 16
_MAX_ROWS = (1 << 31) - 1
_EXPANSION = 8


Indices = NDArray[np.int32]


@dataclass(slots=True)
class Table:
    """One prepared table; ``first`` maps a region id to its first row."""

    handle: int
    version: int
    first: dict[int, int]

    def rows(self, regions: NDArray[np.int64], offsets: NDArray[np.uint64], unit: int) -> Indices:
        """The table's rows for blocks at ``offsets``; raises ``StaleDescriptorError``."""
        rows = (offsets // np.uint64(unit)).astype(np.int64)
        only = int(regions[0])
        if len(regions) == 1 or bool((regions == only).all()):
            rows += self._first(only)
            return rows.astype(np.int32)
        ids, where = np.unique(regions, return_inverse=True)
        rows += np.array([self._first(int(region_id)) for region_id in ids])[where]
        return rows.astype(np.int32)

    def _first(self, region_id: int) -> int:
        first = self.first.get(region_id)
        if first is None:
            raise StaleDescriptorError(f"region {region_id} is not registered any more")
        return first


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
            self._tables.move_to_end(key)
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
        return Table(handle, book.version, first)


class UnitHistory:
    """Remembers block sizes, so that a table is only built for one that returns."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def returning(self, unit: int) -> bool:
        known = unit in self._seen
        self._seen[unit] = None
        self._seen.move_to_end(unit)
        if len(self._seen) > 4 * _MAX_UNITS:
            self._seen.popitem(last=False)
        return known


def common_unit(blocks: Blocks) -> int:
    """The block size whose multiples all descriptors are, or 0 if none pays.

    Descriptors of one size at multiples of it are the usual case.  Runs of
    different lengths share a smaller unit; NIXL joins the pieces of a run
    again, so that costs only index entries.
    """
    if len(blocks) == 1:
        unit = int(blocks.nbytes[0])
        aligned = not int(blocks.local_offset[0]) % unit and not int(blocks.remote_offset[0]) % unit
        return unit if aligned and unit >= MIN_UNIT else 0
    unit = int(np.gcd.reduce(blocks.nbytes))
    unit = math.gcd(unit, int(np.gcd.reduce(blocks.local_offset)))
    unit = math.gcd(unit, int(np.gcd.reduce(blocks.remote_offset)))
    if unit < MIN_UNIT or blocks.total_bytes // unit > _EXPANSION * len(blocks):
        return 0
    return unit


def expand(rows: Indices, counts: NDArray[np.int64]) -> Indices:
    """Index ``rows[i], rows[i] + 1, ...``, ``counts[i]`` of them, for every i."""
    first = np.cumsum(counts) - counts
    steps = np.arange(int(counts.sum())) - np.repeat(first, counts)
    return (np.repeat(rows, counts) + steps).astype(np.int32)
