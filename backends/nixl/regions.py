"""Local and remote regions as rows of NIXL descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks
from kvtransport.errors import StaleDescriptorError
from kvtransport_backends.nixl.driver import Rows

_Vector = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Placed:
    """A region as NIXL knows it; ``device_id`` is part of NIXL's address."""

    region_id: int
    kind: str
    device_id: int
    address: int
    nbytes: int

    def overlaps(self, other: Placed) -> bool:
        """Whether NIXL could take a descriptor of one region for the other's."""
        same_space = (self.kind == "host", self.device_id) == (
            other.kind == "host",
            other.device_id,
        )
        apart = (
            self.address + self.nbytes <= other.address
            or other.address + other.nbytes <= self.address
        )
        return same_space and not apart


class RegionBook:
    """The regions of one agent.  ``version`` changes with every change."""

    def __init__(self) -> None:
        self._placed: dict[int, Placed] = {}
        self.version = 0

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._placed

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._placed.values())

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, placed: Placed) -> None:
        self._placed[placed.region_id] = placed
        self.version += 1

    def remove(self, region_id: int) -> Placed:
        placed = self._placed.pop(region_id)
        self.version += 1
        return placed

    def get(self, region_id: int) -> Placed:
        """Raises ``StaleDescriptorError`` for an id that is not registered now."""
        placed = self._placed.get(region_id)
        if placed is None:
            raise StaleDescriptorError(f"region {region_id} is not registered any more")
        return placed

    def distinct(self, regions: NDArray[np.int64]) -> list[Placed]:
        """The regions that occur in ``regions``, each once."""
        first = int(regions[0])
        if len(regions) == 1 or bool((regions == first).all()):
            return [self.get(first)]
        return [self.get(int(region_id)) for region_id in np.unique(regions)]

    def rows(self, regions: NDArray[np.int64], offsets: _Vector, nbytes: _Vector) -> Rows:
        """n rows (address, bytes, device id); raises ``StaleDescriptorError``."""
        rows = np.empty((len(regions), 3), np.uint64)
        rows[:, 1] = nbytes
        found = self.distinct(regions)
        if len(found) == 1:
            rows[:, 0] = offsets + np.uint64(found[0].address)
            rows[:, 2] = found[0].device_id
            return rows
        ids = np.array([placed.region_id for placed in found])
        where = np.searchsorted(ids, regions)
        addresses = np.array([placed.address for placed in found], np.uint64)
        devices = np.array([placed.device_id for placed in found], np.uint64)
        rows[:, 0] = offsets + addresses[where]
        rows[:, 2] = devices[where]
        return rows


def subset(blocks: Blocks, keep: NDArray[np.bool_] | slice) -> Blocks:
    """The descriptors of ``blocks`` that ``keep`` selects."""
    return Blocks(
        blocks.local_region[keep],
        blocks.local_offset[keep],
        blocks.remote_region[keep],
        blocks.remote_offset[keep],
        blocks.nbytes[keep],
    )


def split_by_kind(blocks: Blocks, local: RegionBook, remote: RegionBook) -> list[Blocks]:
    """Cut ``blocks`` so that each part has one memory kind per side.

    A NIXL descriptor list has one memory type; most transfers need no cut.
    Raises ``StaleDescriptorError``.
    """
    here, there = local.distinct(blocks.local_region), remote.distinct(blocks.remote_region)
    local_kinds = {placed.kind for placed in here}
    remote_kinds = {placed.kind for placed in there}
    if len(local_kinds) == 1 and len(remote_kinds) == 1:
        return [blocks]
    parts = []
    for local_kind in sorted(local_kinds):
        local_ids = [placed.region_id for placed in here if placed.kind == local_kind]
        for remote_kind in sorted(remote_kinds):
            remote_ids = [placed.region_id for placed in there if placed.kind == remote_kind]
            keep = np.isin(blocks.local_region, local_ids)
            keep &= np.isin(blocks.remote_region, remote_ids)
            if keep.any():
                parts.append(subset(blocks, keep))
    return parts


def split_by_bytes(blocks: Blocks, limit: int) -> list[Blocks]:
    """Cut ``blocks`` into parts of at most ``limit`` bytes, in order.

    A descriptor larger than ``limit`` is cut too.
    """
    if blocks.total_bytes <= limit:
        return [blocks]
    blocks = _cut_long(blocks, limit)
    parts, start, total = [], 0, 0
    for index, nbytes in enumerate(blocks.nbytes.tolist()):
        if total + nbytes > limit and index > start:
            parts.append(subset(blocks, slice(start, index)))
            start, total = index, 0
        total += nbytes
    parts.append(subset(blocks, slice(start, None)))
    return parts


def _cut_long(blocks: Blocks, limit: int) -> Blocks:
    if int(blocks.nbytes.max()) <= limit:
        return blocks
    step = np.uint64(limit)
    pieces = ((blocks.nbytes + step - np.uint64(1)) // step).astype(np.int64)
    index = np.repeat(np.arange(len(blocks)), pieces)
    first = np.cumsum(pieces) - pieces
    done = (np.arange(len(index)) - first[index]).astype(np.uint64) * step
    return Blocks(
        blocks.local_region[index],
        blocks.local_offset[index] + done,
        blocks.remote_region[index],
        blocks.remote_offset[index] + done,
        np.minimum(blocks.nbytes[index] - done, step),
    )
