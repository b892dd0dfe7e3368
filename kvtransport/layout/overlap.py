"""Whether the descriptors of one transfer write some byte twice.

The exact answer needs a sort of all descriptors.  Block tables make it cheap:
when indices are unique within a table, only tables can collide, and those are
few.  The sort remains for free-form ranges and for tables that really mesh.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvtransport.backend import Blocks
from kvtransport.layout.blocks import BlockTable, Memory
from kvtransport.layout.vector import Index


@dataclass(frozen=True, slots=True)
class Footprint:
    """The destination bytes of one pair: ``[start, end)`` of a region.

    ``stride`` is 0 for free-form ranges; then only ``known_disjoint`` tells
    whether the pair overlaps itself.
    """

    region_id: int
    start: int
    end: int
    stride: int
    block_nbytes: int
    known_disjoint: bool = True

    @classmethod
    def of_table(cls, table: BlockTable, high: int) -> Footprint:
        """Footprint of unique blocks 0 .. ``high`` of a table."""
        end = table.base + high * table.stride + table.block_nbytes
        return cls(table.region.region_id, table.base, end, table.stride, table.block_nbytes)

    @classmethod
    def of_ranges(cls, region: Memory, offset: Index, nbytes: Index) -> Footprint:
        """Footprint of ranges that lie inside their region."""
        end = offset + nbytes
        ordered = bool((offset[1:] >= end[:-1]).all())
        return cls(region.region_id, int(offset.min()), int(end.max()), 0, 0, ordered)


def find_overlap(footprints: list[Footprint], blocks: Blocks, *, read: bool) -> int | None:
    """Return the id of a destination region that is written twice, or None."""
    if len(footprints) == 1 and footprints[0].known_disjoint:
        return None
    by_region: dict[int, list[Footprint]] = defaultdict(list)
    for footprint in footprints:
        by_region[footprint.region_id].append(footprint)
    for region_id, found in by_region.items():
        if not _surely_disjoint(found) and _overlaps(blocks, region_id, read=read):
            return region_id
    return None


def _surely_disjoint(found: list[Footprint]) -> bool:
    if not all(footprint.known_disjoint for footprint in found):
        return False
    if len(found) == 1:
        return True
    ordered = sorted(found, key=lambda footprint: footprint.start)
    if all(a.end <= b.start for a, b in pairwise(ordered)):
        return True
    return _interleaved(ordered)


def _interleaved(found: list[Footprint]) -> bool:
    """Whether tables of one stride occupy different parts of each period."""
    stride = found[0].stride
    if not stride or any(footprint.stride != stride for footprint in found):
        return False
    phases = sorted((f.start % stride, f.block_nbytes) for f in found)
    first = phases[0][0]
    return all(
        a[0] + a[1] <= b[0] for a, b in zip(phases, [*phases[1:], (first + stride, 0)], strict=True)
    )


def _overlaps(blocks: Blocks, region_id: int, *, read: bool) -> bool:
    region = blocks.local_region if read else blocks.remote_region
    offset = blocks.local_offset if read else blocks.remote_offset
    mine = region == region_id
    start, nbytes = offset[mine], blocks.nbytes[mine]
    order = np.argsort(start, kind="stable")
    start = start[order]
    end = start + nbytes[order]
    return bool((start[1:] < end[:-1]).any())
