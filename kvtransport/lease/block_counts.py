"""How many holdings keep each block: shared blocks cost the budget only once."""

from __future__ import annotations

import numpy as np

from kvtransport.errors import ConfigError
from kvtransport.lease.runs import BlockIds


class BlockCounts:
    """Counts per block id; ``distinct`` is the number of blocks with a count."""

    def __init__(self, capacity: int, null_block: int | None) -> None:
        self._counts = np.zeros(max(1, capacity), dtype=np.int32)
        self._null_block = null_block
        self.distinct = 0

    def unique(self, rows: tuple[BlockIds, ...]) -> BlockIds:
        """All block ids of a holding without the placeholder block.

        Raises ``ConfigError`` for a negative id.
        """
        ids = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if self._null_block is not None:
            ids = ids[ids != self._null_block]
        if ids.size:
            # One pass finds both ends: a negative id is a huge unsigned one.
            top = int(ids.view(np.uint32).max())
            if top > 0x7FFFFFFF:
                raise ConfigError("block ids must not be negative")
            if top >= self._counts.size:
                grown = np.zeros(top + 1 + top // 4, dtype=np.int32)
                grown[: self._counts.size] = self._counts
                self._counts = grown
        return ids

    def add(self, ids: BlockIds) -> int:
        """Count one more keeper; returns how many blocks had none before."""
        counts = self._counts[ids]
        fresh = counts.size - int(np.count_nonzero(counts))
        counts += 1
        self._counts[ids] = counts
        self.distinct += fresh
        return fresh

    def remove(self, ids: BlockIds) -> int:
        """Count one keeper less; returns how many blocks have none now."""
        counts = self._counts[ids]
        counts -= 1
        self._counts[ids] = counts
        freed = counts.size - int(np.count_nonzero(counts))
        self.distinct -= freed
        return freed
