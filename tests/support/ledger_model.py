"""The ledger written down a second time: lists, loops, no cleverness."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtransport.lease.digest import DigestChain
from kvtransport.lease.holding import Dropped, DropReason, Holding, Purpose

GROUP = 16


@dataclass(eq=False)
class Kept:
    """What the model knows about one holding."""

    holding_id: int
    request_id: str
    tenant: str
    tokens: tuple[int, ...]
    purpose: Purpose
    blocks: frozenset[int]
    expires_s: float
    ending: DropReason | None = None
    leases: set[int] = field(default_factory=set)

    @property
    def retained(self) -> bool:
        return self.purpose is Purpose.RETAINED


@dataclass(eq=False)
class KeptLease:
    holding: Kept
    handoff: str
    began_s: float
    expires_s: float


class Model:
    """Mirrors what must happen; victims of pressure and budget are told to it."""

    def __init__(self, budget: int, lease_max_s: float, lease_total_s: float) -> None:
        self.budget = budget
        self.lease_max_s = lease_max_s
        self.lease_total_s = lease_total_s
        self.now = 0.0
        self.kept: list[Kept] = []
        self.leases: dict[int, KeptLease] = {}
        self.dropped: dict[int, DropReason] = {}

    # -- endings

    def expire(self) -> None:
        for lease_id, lease in sorted(self.leases.items(), key=lambda item: item[1].expires_s):
            if lease.expires_s <= self.now:
                self.end_lease(lease_id)
        for kept in list(self.kept):
            if kept.expires_s <= self.now and kept.ending is None:
                late = DropReason.EXPIRED if kept.retained else DropReason.HANDOFF_EXPIRED
                self.end(kept, late)

    def end_lease(self, lease_id: int) -> None:
        holding = self.leases.pop(lease_id).holding
        holding.leases.remove(lease_id)
        if not holding.leases and holding.ending is not None:
            self.drop(holding, holding.ending)

    def end(self, kept: Kept, reason: DropReason) -> None:
        if kept.leases:
            kept.ending = kept.ending or reason
        else:
            self.drop(kept, reason)

    def drop(self, kept: Kept, reason: DropReason) -> None:
        assert not kept.leases, "dropped while leased"
        self.kept.remove(kept)
        self.dropped[kept.holding_id] = reason

    def gave_up(self, dropped: Dropped) -> None:
        """The ledger chose a victim: it must be one that may be given up."""
        kept = next(k for k in self.kept if k.holding_id == dropped.holding.holding_id)
        assert kept.retained, "a handoff yielded to pressure"
        self.drop(kept, dropped.reason)

    # -- finding

    def shared(self, kept: Kept, tenant: str, tokens: tuple[int, ...]) -> int:
        """Full groups that query and holding share."""
        if kept.tenant != tenant:
            return 0
        groups = 0
        while (groups + 1) * GROUP <= min(len(tokens), len(kept.tokens)) and kept.tokens[
            : (groups + 1) * GROUP
        ] == tokens[: (groups + 1) * GROUP]:
            groups += 1
        return groups

    def longest(self, tenant: str, tokens: tuple[int, ...]) -> int:
        live = [k for k in self.kept if k.ending is None]
        return max((self.shared(k, tenant, tokens) for k in live), default=0)

    def handoff(self, request_id: str) -> Kept | None:
        named = [k for k in self.kept if k.request_id == request_id and not k.retained]
        return next((k for k in reversed(named) if k.ending is None), None)

    def prefixes(self, tenant: str, tokens: tuple[int, ...]) -> list[Kept]:
        """Retained ones that the new sequence makes superfluous."""
        return [
            k
            for k in self.kept
            if k.retained
            and k.ending is None
            and k.tenant == tenant
            and k.tokens == tokens[: len(k.tokens)]
        ]

    # -- sums

    def retained_blocks(self) -> set[int]:
        return {block for kept in self.kept if kept.retained for block in kept.blocks}

    def lease_end(self, duration_s: float, began_s: float) -> float:
        return min(self.now + min(duration_s, self.lease_max_s), began_s + self.lease_total_s)


def rows(blocks: list[int]) -> tuple[np.ndarray, ...]:
    return (np.array(blocks, dtype=np.int32),)


def same(holding: Holding, kept: Kept, chain: DigestChain) -> bool:
    return holding.holding_id == kept.holding_id and holding.chain == chain.digests
