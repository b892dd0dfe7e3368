"""The retained holdings' share of the cache: budget, policy, what they occupy.

A block that several holdings keep counts once.  Used under the ledger's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtransport.lease.block_counts import BlockCounts
from kvtransport.lease.holding import Holding, Refusal
from kvtransport.policy.retention import RetentionPolicy


class Gauges(NamedTuple):
    """How much a ledger holds now; ``retained_blocks`` are distinct."""

    holdings: int
    handoffs: int
    retained: int
    retained_blocks: int
    budget_blocks: int
    leases: int


class Retained:
    """Accounts for retained holdings and asks the policy about them."""

    def __init__(self, policy: RetentionPolicy, cache_blocks: int, null_block: int | None) -> None:
        self.policy = policy
        self.budget_blocks = policy.budget_blocks(cache_blocks)
        self._nbytes = 0
        self._kept = 0
        self._counts = BlockCounts(cache_blocks, null_block)
        self._pinned = BlockCounts(cache_blocks, null_block)
        self._number = 0

    def __len__(self) -> int:
        return self._number

    @property
    def blocks(self) -> int:
        """Distinct blocks that retained holdings keep."""
        return self._counts.distinct

    @property
    def nbytes(self) -> int:
        """Size of these blocks, at the mean size of all holdings' blocks."""
        return self._nbytes * self.blocks // self._kept if self._kept else 0

    def gauges(self, holdings: int, leases: int) -> Gauges:
        """These numbers beside those of the whole ledger."""
        handoffs = holdings - self._number
        return Gauges(holdings, handoffs, self._number, self.blocks, self.budget_blocks, leases)

    def claim(
        self,
        holding: Holding,
        leaving: Sequence[Holding],
        now: float,
        give_up: Callable[[Holding, float], None],
    ) -> Refusal | None:
        """Fit ``holding`` into the budget, giving up what the policy names.

        ``leaving`` are unleased holdings that go once this one is in; they make
        room too, and stay when it is refused.  Nothing is given up for what
        can't fit beside leased holdings; when the policy stops half-way, what
        it gave up until then is gone.  Raises ``ConfigError`` for a negative
        block id, with nothing changed.
        """
        counted = holding.counted = self._counts.positions(holding.block_ids)
        # Before anything else: it raises for ids that can't be right.
        holding.alone = self._counts.add(counted)
        if self._pinned.distinct_with(counted) > self.budget_blocks:
            self._counts.remove(counted)
            return Refusal.OVER_BUDGET
        # In first, so that blocks both have never seem to be nobody's.
        self._added(holding, now)
        for old in leaving:
            self.forget(old)
        refusal = None
        while self._counts.distinct > self.budget_blocks:
            victim = self.policy.victim(now, holding)
            if victim is None or victim is holding:
                refusal = Refusal.NOT_WORTH
                self.forget(holding)
                break
            give_up(victim, now)
        if refusal is not None:
            for old in leaving:
                assert old.counted is not None
                old.alone = self._counts.add(old.counted)
                self._added(old, now)
        return refusal

    def forget(self, holding: Holding) -> int:
        """Stop counting the holding; returns how many blocks nobody retains now."""
        assert holding.counted is not None
        holding.alone = freed = self._counts.remove(holding.counted)
        self.policy.removed(holding)
        self._number -= 1
        self._nbytes -= holding.nbytes
        self._kept -= holding.blocks
        return freed

    def _added(self, holding: Holding, now: float) -> None:
        self._kept += holding.blocks
        self._number += 1
        self._nbytes += holding.nbytes
        self.policy.added(holding, now)

    def pin(self, holding: Holding) -> None:
        """The first lease began."""
        assert holding.counted is not None
        self._pinned.add(holding.counted)
        self.policy.pinned(holding)

    def unpin(self, holding: Holding, now: float) -> None:
        """The last lease ended; a holding that ends with it is not for the policy any more."""
        assert holding.counted is not None
        self._pinned.remove(holding.counted)
        if holding.ending is None:
            self.policy.unpinned(holding, now)

    def note_return(self, holding: Holding, now: float) -> None:
        """Somebody asked for all of it: the conversation came back."""
        if not holding.returned:
            holding.returned = True
            self.policy.returned(holding, now - holding.created_s)

    def note_end(self, holding: Holding, now: float) -> None:
        """It is dropped; the policy learns that nobody had come back."""
        if not holding.returned:
            self.policy.lapsed(holding, now - holding.created_s)
