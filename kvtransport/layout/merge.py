"""Merging runs that are adjacent on both sides.

Two descriptors become one when the second begins where the first ends, locally
*and* remotely.  Block indices are first put into local order: allocators hand
blocks out in descending or interleaved order, and what is adjacent in memory
should merge whatever the order in which it was listed.  The order of the
descriptors of one transfer has no meaning, so this never changes the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtransport.layout.blocks import Index


@dataclass(frozen=True, slots=True)
class Runs:
    """n runs: starts (blocks or bytes) on both sides, and their lengths."""

    local: Index
    remote: Index
    length: Index


def index_runs(local: Index, remote: Index) -> Runs:
    """Merge equal-length block index vectors into runs of blocks.

    Merging ``[4, 5, 6, 9]`` with ``[0, 1, 2, 3]`` gives ``(4, 0, 3), (9, 3, 1)``.
    """
    if len(local) > 1 and not (local[1:] > local[:-1]).all():
        order = np.argsort(local, kind="stable")
        local, remote = local[order], remote[order]
    joined = (local[1:] - local[:-1] == 1) & (remote[1:] - remote[:-1] == 1)
    if joined.all():
        return Runs(local[:1], remote[:1], np.full(min(1, len(local)), len(local), np.int64))
    start = np.flatnonzero(np.concatenate(([True], ~joined)))
    length = np.diff(start, append=len(local))
    return Runs(local[start], remote[start], length)


def range_runs(local: Index, remote: Index, nbytes: Index) -> Runs:
    """Merge byte ranges in the order given; lengths are bytes, all positive."""
    joined = (local[1:] == local[:-1] + nbytes[:-1]) & (remote[1:] == remote[:-1] + nbytes[:-1])
    start = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Runs(local[start], remote[start], np.add.reduceat(nbytes, start))


def single_blocks(local: Index, remote: Index) -> Runs:
    """One run per block: what tables with gaps between their blocks need."""
    return Runs(local, remote, np.ones(len(local), np.int64))
