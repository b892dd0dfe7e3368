"""Short pairs as Python integers.

Below a handful of elements numpy's cost per call exceeds its work many times,
and for a transfer of 64 KiB that is a visible part of the whole.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvtransport.layout.blocks import BlockPair, RangePair

SHORT = 8
"""Vectors up to this length are short."""

_LIMIT = 1 << 63

Row = tuple[int, int, int]
"""Local offset, remote offset and length, in bytes."""


def short_ints(values: Any) -> list[int] | None:
    """Return a short vector of integers from 0 to 2^63 - 1 as a list, else None."""
    if type(values) is np.ndarray:
        if values.ndim != 1 or len(values) > SHORT or values.dtype.kind not in "iu":
            return None
        found: list[int] = values.tolist()
    elif type(values) in {list, tuple} and len(values) <= SHORT:
        found = values
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
    """Rows of a short range pair that lies inside its regions, else None."""
    local, remote = short_ints(pair.local_offset), short_ints(pair.remote_offset)
    nbytes: Any = pair.nbytes
    if local is None or remote is None:
        return None
    if type(nbytes) is int and 0 <= nbytes < _LIMIT:
        sizes: list[int] | None = [nbytes] * len(local)
    else:
        sizes = short_ints(nbytes)
    if sizes is None or not len(local) == len(remote) == len(sizes):
        return None
    mine, theirs = pair.local.nbytes, pair.remote.nbytes
    rows = []
    for row in zip(local, remote, sizes, strict=True):
        lo, ro, n = row
        if lo + n > mine or ro + n > theirs:
            return None
        if n:
            rows.append(row)
    return rows


def short_blocks(pair: BlockPair) -> list[Row] | None:
    """Rows of a short block pair with valid indices, else None."""
    mine, theirs = pair.local, pair.remote
    size = mine.block_nbytes
    local, remote = short_ints(pair.local_index), short_ints(pair.remote_index)
    if local is None or remote is None or len(local) != len(remote) or size != theirs.block_nbytes:
        return None
    rows = []
    for i, j in zip(local, remote, strict=True):
        if i >= mine.count or j >= theirs.count:
            return None
        rows.append((mine.base + i * mine.stride, theirs.base + j * theirs.stride, size))
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


def overlapping(spans: list[tuple[int, int, int]]) -> bool:
    """Whether two of the spans (region id, start, end) share bytes."""
    spans.sort()
    return any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(spans))
