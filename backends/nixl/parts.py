"""Cutting a transfer into parts, each of which becomes one NIXL request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks
from kvtransport_backends.nixl.driver import Rows
from kvtransport_backends.nixl.regions import Placed, RegionBook

MIN_UNIT = 512
_EXPANSION = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Descriptors with one memory kind per side, and the regions they name."""

    blocks: Blocks
    local: tuple[Placed, ...]
    remote: tuple[Placed, ...]


def cut(blocks: Blocks, local: RegionBook, remote: RegionBook, limit: int) -> list[Part]:
    """Parts of at most ``limit`` bytes, in order.

    Raises ``StaleDescriptorError`` for a region that a side does not have.
    """
    here = local.distinct(blocks.local_region)
    there = remote.distinct(blocks.remote_region)
    whole = Part(blocks, here, there)
    if len(here) == 1 and len(there) == 1:
        return _cut_by_bytes(whole, limit)
    return [part for one in _cut_by_kind(whole) for part in _cut_by_bytes(one, limit)]


def rows(
    regions: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    found: tuple[Placed, ...],
) -> Rows:
    """N rows (address, bytes, device id); ``found`` are the regions that occur."""
    table = np.empty((len(regions), 3), np.uint64)
    table[:, 1] = nbytes
    if len(found) == 1:
        table[:, 0] = offsets + np.uint64(found[0].address)
        table[:, 2] = found[0].device_id
        return table
    where = np.searchsorted([placed.region_id for placed in found], regions)
    addresses = np.array([placed.address for placed in found], np.uint64)
    devices = np.array([placed.device_id for placed in found], np.uint64)
    table[:, 0] = offsets + addresses[where]
    table[:, 2] = devices[where]
    return table


def common_unit(blocks: Blocks) -> int:
    """The block size whose multiples all descriptors are, or 0 if none pays.

    Descriptors of one size at multiples of it are the usual case.  Runs of
    different lengths share a smaller unit; NIXL joins the pieces of a run
    again, so that costs only index entries.
    """
    first = int(blocks.nbytes[0])
    if len(blocks) == 1:
        aligned = not int(blocks.local_offset[0]) % first
        aligned = aligned and not int(blocks.remote_offset[0]) % first
        return first if aligned and first >= MIN_UNIT else 0
    bits = int(np.bitwise_or.reduce(blocks.local_offset))
    bits |= int(np.bitwise_or.reduce(blocks.remote_offset))
    bits |= int(np.bitwise_or.reduce(blocks.nbytes))
    unit = bits & -bits  # the largest power of two that divides everything
    if unit != first:
        vectors = (blocks.nbytes, blocks.local_offset, blocks.remote_offset)
        unit = math.gcd(*(int(np.gcd.reduce(vector)) for vector in vectors))
    if unit < MIN_UNIT or (unit != first and blocks.total_bytes // unit > _EXPANSION * len(blocks)):
        return 0
    return unit


def _cut_by_kind(whole: Part) -> list[Part]:
    local_kinds = {placed.kind for placed in whole.local}
    remote_kinds = {placed.kind for placed in whole.remote}
    if len(local_kinds) == 1 and len(remote_kinds) == 1:
        return [whole]
    parts = []
    for local_kind in sorted(local_kinds):
        local = tuple(placed for placed in whole.local if placed.kind == local_kind)
        mine = np.isin(whole.blocks.local_region, [placed.region_id for placed in local])
        for remote_kind in sorted(remote_kinds):
            remote = tuple(placed for placed in whole.remote if placed.kind == remote_kind)
            theirs = np.isin(whole.blocks.remote_region, [placed.region_id for placed in remote])
            keep = mine & theirs
            if keep.any():
                parts.append(Part(_subset(whole.blocks, keep), local, remote))
    return parts


def _cut_by_bytes(part: Part, limit: int) -> list[Part]:
    if part.blocks.total_bytes <= limit:
        return [part]
    blocks = _cut_long(part.blocks, limit)
    pieces, start, total = [], 0, 0
    for index, nbytes in enumerate(blocks.nbytes.tolist()):
        if total + nbytes > limit and index > start:
            pieces.append(_subset(blocks, slice(start, index)))
            start, total = index, 0
        total += nbytes
    pieces.append(_subset(blocks, slice(start, None)))
    # A piece may name fewer regions than the whole; naming more does no harm.
    return [Part(piece, part.local, part.remote) for piece in pieces]


def _cut_long(blocks: Blocks, limit: int) -> Blocks:
    """Cut descriptors longer than ``limit``."""
    if int(blocks.nbytes.max()) <= limit:
        return blocks
    step = np.uint64(limit)
    counts = ((blocks.nbytes + step - np.uint64(1)) // step).astype(np.int64)
    index = np.repeat(np.arange(len(blocks)), counts)
    first = np.cumsum(counts) - counts
    done = (np.arange(len(index)) - first[index]).astype(np.uint64) * step
    return Blocks(
        blocks.local_region[index],
        blocks.local_offset[index] + done,
        blocks.remote_region[index],
        blocks.remote_offset[index] + done,
        np.minimum(blocks.nbytes[index] - done, step),
    )


def _subset(blocks: Blocks, keep: NDArray[np.bool_] | slice) -> Blocks:
    return Blocks(
        blocks.local_region[keep],
        blocks.local_offset[keep],
        blocks.remote_region[keep],
        blocks.remote_offset[keep],
        blocks.nbytes[keep],
    )
