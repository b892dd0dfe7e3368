"""One transfer's descriptors, resolved to addresses on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks, Op
from kvtransport_backends.host._table import RegionTable
from kvtransport_backends.host._vectors import Vectors, split
from kvtransport_backends.host._wire import (
    DESCRIPTOR,
    MAX_DESCRIPTORS,
    MAX_PAYLOAD_BYTES,
    Descriptors,
)

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Vectors of equal length; ``slots`` and ``words`` name the guard words to see."""

    local: Addresses
    remote: Addresses
    region: NDArray[np.int64]
    offset: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    slots: NDArray[np.intp]
    words: NDArray[np.int64]
    total: int

    def batches(self) -> Iterator[tuple[Descriptors, Vectors]]:
        """Requests of the serving protocol, each with the local memory it concerns."""
        ends = self.nbytes.astype(np.int64).cumsum()
        start = 0
        while start < len(ends):
            done = int(ends[start - 1]) if start else 0
            stop = int(ends.searchsorted(done + MAX_PAYLOAD_BYTES, side="right"))
            part = slice(start, min(stop, start + MAX_DESCRIPTORS))
            rows = np.empty(part.stop - start, DESCRIPTOR)
            rows["region"] = self.region[part]
            rows["offset"] = self.offset[part]
            rows["nbytes"] = self.nbytes[part]
            rows["source"] = self.local[part]
            yield rows, Vectors(self.local[part], self.nbytes[part])
            start = part.stop


def make_plan(
    blocks: Blocks, op: Op, local: RegionTable, remote: RegionTable, chunk_bytes: int
) -> Plan:
    """Check and resolve ``blocks``; no piece of the result exceeds ``chunk_bytes``.

    Raises ``StaleDescriptorError``, ``OutOfBoundsError`` or ``DescriptorError``.
    """
    nbytes = blocks.nbytes
    _, here = local.locate(blocks.local_region, blocks.local_offset, nbytes, "local")
    used, there = remote.locate(blocks.remote_region, blocks.remote_offset, nbytes, op.value)
    region, offset = blocks.remote_region, blocks.remote_offset
    total = int(nbytes.sum())
    limit = min(chunk_bytes, MAX_PAYLOAD_BYTES)
    if total > limit and int(nbytes.max()) > limit:
        owner, inner, nbytes = split(nbytes, limit)
        here, there = here[owner] + inner, there[owner] + inner
        region, offset = region[owner], offset[owner] + inner
    words = remote.region_ids(used) + 1
    return Plan(here, there, region, offset, nbytes, remote.guard_slots(used), words, total)
