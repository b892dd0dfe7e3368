"""Scatter lists over raw addresses, built by numpy and consumed from the front.

One row per descriptor costs nothing in Python: the kernel reads the array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtransport_backends.host._sys import IOV_MAX

IOVEC_BYTES = 16


class Vectors:
    """``struct iovec[n]`` plus how far it has been consumed.

    ``addresses`` and ``lengths`` are uint64 vectors of equal length n >= 1.
    """

    __slots__ = ("_ends", "_next", "_pointer", "_rows", "done", "total")

    def __init__(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        self._rows = np.empty((len(lengths), 2), np.uint64)
        self._rows[:, 0] = addresses
        self._rows[:, 1] = lengths
        self._pointer = self._rows.ctypes.data
        self._ends = lengths.astype(np.int64).cumsum()
        self._next = 0
        self.done = 0
        self.total = int(self._ends[-1])

    @property
    def remaining(self) -> int:
        return self.total - self.done

    def window(self, max_bytes: int) -> tuple[int, int]:
        """Pointer to and number of the next rows: at least one, about ``max_bytes``."""
        last = int(self._ends.searchsorted(self.done + max_bytes, side="right"))
        return self._pointer + IOVEC_BYTES * self._next, min(max(last - self._next, 1), IOV_MAX)

    def advance(self, moved: int) -> None:
        """Consume ``moved`` bytes from the front."""
        self.done += moved
        self._next = int(self._ends.searchsorted(self.done, side="right"))
        if self._next < len(self._ends):
            row = self._rows[self._next]
            left = int(self._ends[self._next]) - self.done
            row[0] = int(row[0]) + int(row[1]) - left
            row[1] = left


def split(
    lengths: NDArray[np.uint64], limit: int
) -> tuple[NDArray[np.intp], NDArray[np.uint64], NDArray[np.uint64]]:
    """Cut descriptors longer than ``limit`` into pieces.

    Returns, per piece, the descriptor it belongs to, its offset inside that
    descriptor and its length.
    """
    pieces = (lengths + np.uint64(limit - 1)) // np.uint64(limit)
    counts = pieces.astype(np.intp)
    owner = np.repeat(np.arange(len(lengths)), counts)
    first = np.repeat(counts.cumsum() - counts, counts)
    inner = (np.arange(len(owner)) - first).astype(np.uint64) * np.uint64(limit)
    return owner, inner, np.minimum(lengths[owner] - inner, np.uint64(limit))
