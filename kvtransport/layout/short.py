"""The path for transfers of a few descriptors.

Below a handful of elements numpy's cost per call exceeds its work many times,
and for a transfer of 64 KiB that is a visible part of the whole.  The checks are
those of the vector path; a property test holds the two together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvtransport.errors import LengthMismatchError
from kvtransport.layout.blocks import BlockPair, RangePair

SHORT = 4
"""Vectors up to this length are handled as Python integers."""

_LIMIT = 1 << 63

Row = tuple[int, int, int]
"""Local offset, remote offset and length, in bytes."""


def short_ints(values: Any) -> list[int] | None:
    """Return a short vector of valid integers as a list.

    None sends the caller to the vector path, which handles everything and
    reports what is wrong.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.size > SHORT or values.dtype.kind not in "iu":
            return None
        found: list[int] = values.tolist()
    elif type(values) in {list, tuple} and len(values) <= SHORT:
        found = list(values)
        for value in found:
            if type(value) is not int:
                return None
    else:
        return None
    for value in found:
        if not 0 <= value < _LIMIT:
            return None
    return found


def short_ranges(pair: RangePair) -> list[Row] | None:
    """Rows of a range pair, without empty ones; None when it is not short."""
    local, remote = short_ints(pair.local_offset), short_ints(pair.remote_offset)
    if local is None or remote is None:
        return None
    nbytes: Any = pair.nbytes
    if type(nbytes) is int and 0 <= nbytes < _LIMIT:
        sizes: list[int] | None = [nbytes] * len(local)
    else:
        sizes = short_ints(nbytes)
    if sizes is None or not len(local) == len(remote) == len(sizes):
        return None
    return [row for row in zip(local, remote, sizes, strict=True) if row[2]]


def short_blocks(pair: BlockPair) -> list[Row] | None:
    """Rows of a block pair with valid indices; None when it is not short."""
    mine, theirs = pair.local, pair.remote
    local, remote = short_ints(pair.local_index), short_ints(pair.remote_index)
    if local is None or remote is None:
        return None
    if len(local) != len(remote):
        raise LengthMismatchError(
            f"local_index names {len(local)} blocks, remote_index {len(remote)}"
        )
    rows = []
    for i, j in zip(local, remote, strict=True):
        if i >= mine.count or j >= theirs.count:
            return None
        offsets = mine.base + i * mine.stride, theirs.base + j * theirs.stride
        rows.append((*offsets, mine.block_nbytes))
    return rows


def merge_rows(rows: list[Row]) -> list[Row]:
    """Merge rows that are adjacent on both sides, in local order."""
    merged: list[Row] = []
    for local, remote, nbytes in sorted(rows):
        if merged:
            last = merged[-1]
            if last[0] + last[2] == local and last[1] + last[2] == remote:
                merged[-1] = (last[0], last[1], last[2] + nbytes)
                continue
        merged.append((local, remote, nbytes))
    return merged


def overlapping(rows: list[Row], side: int) -> bool:
    """Whether two rows share bytes on side 0 (local) or 1 (remote)."""
    spans = sorted((row[side], row[side] + row[2]) for row in rows)
    return any(a[1] > b[0] for a, b in pairwise(spans))
