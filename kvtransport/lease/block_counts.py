"""How many holdings keep each block: shared blocks cost the budget only once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import ConfigError
from kvtransport.lease.runs import BlockIds

Positions = NDArray[np.intp]

# Made once, so that numpy need not look the types up.
_UNSIGNED = np.dtype(np.uint32)
_POSITION = np.dtype(np.intp)

# Adding as many ones as there are counts is faster than adding a single one to all.
_ONES = np.ones(4096, dtype=np.int32)


class BlockCounts:
    """Counts per block id; ``distinct`` is the number of blocks with a count."""

    def __init__(self, capacity: int, null_block: int | None) -> None:
        self._counts = np.zeros(max(1, capacity), dtype=np.int32)
        self._null_block = null_block
        self.distinct = 0

    def positions(self, rows: tuple[BlockIds, ...]) -> Positions:
        """All blocks of a holding but the placeholder, in the form numpy indexes fastest.

        Raises ``ConfigError`` for a negative id; ``add`` and ``remove`` of what
        is returned can't fail.
        """
        ids = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if self._null_block is not None:
            ids = ids[ids != self._null_block]
        # Seen as unsigned, a negative id is out of range instead of wrapping round.
        at = ids.view(_UNSIGNED).astype(_POSITION)
        try:
            self._counts[at]
        except IndexError:
            top = int(at.max())
            if top > 0x7FFFFFFF:
                raise ConfigError("block ids must not be negative") from None
            self.reserve(top + 1 + top // 4)
        return at

    def distinct_with(self, at: Positions) -> int:
        """What ``distinct`` would be after ``add``."""
        if not self.distinct:
            return at.size
        return self.distinct + at.size - int(np.count_nonzero(self._counts[at]))

    def add(self, at: Positions) -> None:
        """Count one more keeper of each block."""
        counts = self._counts[at]
        self.distinct += counts.size - int(np.count_nonzero(counts))
        self._counts[at] = np.add(counts, _ones(counts.size), counts)

    def remove(self, at: Positions) -> int:
        """Count one keeper less; returns how many blocks have none now."""
        counts = self._counts[at]
        self._counts[at] = np.subtract(counts, _ones(counts.size), counts)
        freed = counts.size - int(np.count_nonzero(counts))
        self.distinct -= freed
        return freed

    @property
    def capacity(self) -> int:
        return self._counts.size

    def reserve(self, capacity: int) -> None:
        """Make room for ids below ``capacity``."""
        if capacity > self._counts.size:
            grown = np.zeros(capacity, dtype=np.int32)
            grown[: self._counts.size] = self._counts
            self._counts = grown


def _ones(size: int) -> NDArray[np.int32]:
    return _ONES[:size] if size <= _ONES.size else np.ones(size, dtype=np.int32)
