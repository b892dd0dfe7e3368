"""Cutting a transfer into posts that respect a backend's limits."""

from __future__ import annotations

import numpy as np

from kvtransport.backend import Blocks
from kvtransport.capabilities import Capabilities


def split_blocks(blocks: Blocks, limits: Capabilities) -> tuple[Blocks, ...]:
    """Return posts of at most ``max_descriptors`` and ``max_transfer_bytes`` each.

    A descriptor larger than ``max_transfer_bytes`` is cut into pieces that are
    multiples of ``min_align``.  Without limits the input is returned as it is.
    """
    if limits.max_transfer_bytes is not None:
        blocks = _cut(blocks, limits.max_transfer_bytes, limits.min_align)
    count = limits.max_descriptors
    if limits.max_transfer_bytes is None and (count is None or len(blocks) <= count):
        return (blocks,)
    return tuple(_slice(blocks, a, b) for a, b in _bounds(blocks, limits))


def _cut(blocks: Blocks, max_bytes: int, align: int) -> Blocks:
    """Cut descriptors larger than ``max_bytes`` into pieces."""
    step = np.uint64(max(max_bytes - max_bytes % align, 1))
    if not (blocks.nbytes > step).any():
        return blocks
    pieces = ((blocks.nbytes + step - np.uint64(1)) // step).astype(np.int64)
    row = np.repeat(np.arange(len(blocks)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    skip = (np.arange(len(row)) - first).astype(np.uint64) * step
    return Blocks(
        local_region=blocks.local_region[row],
        local_offset=blocks.local_offset[row] + skip,
        remote_region=blocks.remote_region[row],
        remote_offset=blocks.remote_offset[row] + skip,
        nbytes=np.minimum(blocks.nbytes[row] - skip, step),
    )


def _bounds(blocks: Blocks, limits: Capabilities) -> list[tuple[int, int]]:
    """Greedy slices; every slice holds at least one descriptor."""
    n = len(blocks)
    count = limits.max_descriptors or n
    max_bytes = limits.max_transfer_bytes
    total = np.cumsum(blocks.nbytes) if max_bytes is not None else None
    bounds, start = [], 0
    while start < n:
        end = min(n, start + count)
        if total is not None and max_bytes is not None:
            before = int(total[start - 1]) if start else 0
            fits = int(np.searchsorted(total, np.uint64(before + max_bytes), side="right"))
            end = max(start + 1, min(end, fits))
        bounds.append((start, end))
        start = end
    return bounds


def _slice(blocks: Blocks, start: int, end: int) -> Blocks:
    part = slice(start, end)
    return Blocks(
        blocks.local_region[part],
        blocks.local_offset[part],
        blocks.remote_region[part],
        blocks.remote_offset[part],
        blocks.nbytes[part],
    )
