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

from kvtransport.layout.vector import Index, Vector


@dataclass(frozen=True, slots=True)
class Runs:
    """n runs: starts (blocks or bytes) on both sides, and their lengths."""

    local: Index
    remote: Index
    length: Index


def index_runs(local: Vector, remote: Vector) -> Runs:
    """Merge equal-length, non-empty block index vectors into runs of blocks.

    Merging ``[4, 5, 6, 9]`` with ``[0, 1, 2, 3]`` gives ``(4, 0, 3), (9, 3, 1)``.
    """
    mine, theirs = local.values, remote.values
    if not local.rising:
        order = np.argsort(mine, kind="stable")
        mine, theirs = mine[order], theirs[order]
    apart = (mine[1:] - mine[:-1] != 1) | (theirs[1:] - theirs[:-1] != 1)
    return _runs(mine, theirs, apart)


def _runs(mine: Index, theirs: Index, apart: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Runs:
    """Cut where ``apart`` is true between two neighbours."""
    cuts = apart.nonzero()[0]
    start = np.empty(len(cuts) + 1, np.int64)
    start[0] = 0
    np.add(cuts, 1, out=start[1:])
    length = np.empty_like(start)
    np.subtract(start[1:], start[:-1], out=length[:-1])
    length[-1] = len(mine) - start[-1]
    return Runs(mine[start], theirs[start], length)


def range_runs(local: Index, remote: Index, nbytes: Index) -> Runs:
    """Merge byte ranges in the order given; lengths are bytes, all positive."""
    size = nbytes[:-1]
    apart = (local[1:] != local[:-1] + size) | (remote[1:] != remote[:-1] + size)
    cuts = apart.nonzero()[0]
    start = np.concatenate((np.zeros(1, np.int64), cuts + 1))
    return Runs(local[start], remote[start], np.add.reduceat(nbytes, start))


def single_blocks(local: Vector, remote: Vector) -> Runs:
    """One run per block: what tables with gaps between their blocks need."""
    return Runs(local.values, remote.values, np.ones(len(local), np.int64))
