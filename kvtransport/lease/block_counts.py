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

# An array without dimensions: numpy adds it twice as fast as a number, whose type it looks for.
_ONE = np.array(1, dtype=np.int32)


class BlockCounts:
    """Counts per block id; ``distinct`` is the number of blocks with a count."""

    def __init__(self, capacity: int, null_block: int | None) -> None:
        self._counts = np.zeros(max(1, capacity), dtype=np.int32)
        self._null_block = null_block
        self.distinct = 0

    def positions(self, rows: tuple[BlockIds, ...]) -> Positions:
        """All blocks of a holding but the placeholder, in the form numpy indexes fastest."""
        ids = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if self._null_block is not None:
            ids = ids[ids != self._null_block]
        # Seen as unsigned, a negative id is out of range instead of wrapping round.
        return ids.view(_UNSIGNED).astype(_POSITION)

    def distinct_with(self, at: Positions) -> int:
        """What ``distinct`` would be after ``add``; raises as that does."""
        if not self.distinct:
            return at.size
        return self.distinct + at.size - int(np.count_nonzero(self._of(at)))

    def add(self, at: Positions) -> int:
        """Count one more keeper of each block; returns how many blocks had none.

        Raises ``ConfigError`` for a negative id, and then has counted nothing.
        """
        counts = self._of(at)
        fresh = counts.size - int(np.count_nonzero(counts))
        self.distinct += fresh
        self._counts[at] = np.add(counts, _ONE, counts)
        return fresh

    def remove(self, at: Positions) -> int:
        """Count one keeper less of what was added; returns how many blocks have none now."""
        counts = self._counts[at]
        self._counts[at] = np.subtract(counts, _ONE, counts)
        freed = counts.size - int(np.count_nonzero(counts))
        self.distinct -= freed
        return freed

    def _of(self, at: Positions) -> NDArray[np.int32]:
        try:
            return self._counts[at]
        except IndexError:
            top = int(at.max())
            if top > 0x7FFFFFFF:
                raise ConfigError("block ids must not be negative") from None
            more = np.zeros(top + 1 + top // 4 - self._counts.size, dtype=np.int32)
            self._counts = np.concatenate((self._counts, more))
            return self._counts[at]
