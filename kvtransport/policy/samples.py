"""Bounded samples of measured times, spread over all sizes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PER_SIZE = 24
_FORGET = 4096
_MOST = 1e18
"""More than bytes, descriptors, tokens or their pairs will ever be."""


class Sample(NamedTuple):
    """Two quantities and the seconds that they took."""

    first: float
    second: float
    seconds: float


class Samples:
    """The latest samples of each order of magnitude.

    Many small samples don't push out the few large ones; a sample that is older
    than the last ``_FORGET`` is no longer used.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[tuple[int, Sample]]] = {}
        self.total = 0

    def add(self, sample: Sample) -> None:
        """Keep it; ``usable`` samples only."""
        self.total += 1
        size = int(2 * math.log2(1.0 + sample.first))
        kept = self._by_size.setdefault(size, deque(maxlen=_PER_SIZE))
        kept.append((self.total, sample))

    def kept(self) -> list[Sample]:
        """Oldest first within each size."""
        since = self.total - _FORGET
        return [sample for kept in self._by_size.values() for at, sample in kept if at > since]

    def __len__(self) -> int:
        return sum(map(len, self._by_size.values()))

    def load(self, rows: Iterable[Sequence[float]]) -> None:
        """Add what was saved; rows that can't be samples are left out."""
        for row in rows:
            if len(row) == 3 and usable(*row):
                self.add(Sample(*row))

    def table(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Quantities with a leading column of ones (n x 3), and seconds (n)."""
        kept = np.array(self.kept(), dtype=np.float64).reshape(-1, 3)
        ones = np.ones((len(kept), 1))
        return np.hstack((ones, kept[:, :2])), kept[:, 2]


def usable(first: float, second: float, seconds: float) -> bool:
    """Whether numbers can be a measurement: not negative, in reason, and it took time."""
    return 0 < first <= _MOST and 0 <= second <= _MOST and 0 < seconds < 3600
