"""Words in our own memory by which a reader notices that a region is gone.

A peer that reads our memory directly asks nobody, so nobody can refuse it.
Instead it looks at these words before and after its copy: the agent's nonce,
then one word per region slot that holds ``region_id + 1`` while that region is
registered.  A read counts only if both looks show what the peer expects.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

NONCE_BYTES = 16
WORD_BYTES = 8
HEADER_WORDS = NONCE_BYTES // WORD_BYTES


class Guard:
    """The owner's side.  Not thread-safe; writes are single aligned stores."""

    def __init__(self, nonce: bytes, slots: int) -> None:
        # A private mapping of its own, so that no allocator ever puts other
        # data at this address while a peer still looks at it.
        self._map = mmap.mmap(
            -1,
            (HEADER_WORDS + slots) * WORD_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        self._words: NDArray[np.int64] = np.frombuffer(self._map, np.int64)
        self._words[:HEADER_WORDS] = np.frombuffer(nonce, np.int64)
        self._free = list(range(slots - 1, -1, -1))
        self.address = self._words.ctypes.data
        self.slots = slots

    def acquire(self, region_id: int) -> int | None:
        """Show ``region_id`` as live; returns its slot, None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._words[HEADER_WORDS + slot] = region_id + 1
        return slot

    def release(self, slot: int) -> None:
        """Show the slot's region as withdrawn: reads that end later are discarded."""
        self._words[HEADER_WORDS + slot] = 0
        self._free.append(slot)

    def invalidate(self) -> None:
        """Show the whole agent as closed."""
        self._words[:] = 0
