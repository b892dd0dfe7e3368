"""``budgeted``: give up first what is worth least per byte.

The value of a holding is the chance that its conversation comes back before the
holding expires, times the compute time that this would save, per byte.  The
chance is learned from this engine's own think times (``returns``).

With tenant quotas each tenant has a share of the budget.  A tenant may use more
while others leave room; when room is short, the tenant that is furthest over
its share gives up first, so nobody can push out another's share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtransport.config import decode
from kvtransport.errors import ConfigError
from kvtransport.policy.options import require_range
from kvtransport.policy.pools import Entry, Pool
from kvtransport.policy.retention import BudgetOptions, RetentionPolicy
from kvtransport.policy.returns import CLASSES, ReturnModel, class_of
from kvtransport.policy.shares import TOGETHER, Shares

if TYPE_CHECKING:
    from kvtransport.lease.holding import Holding

_UNKNOWN_TOKEN_S = 1e-4
"""Compute time per token while nothing better is known; only ratios matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions(BudgetOptions):
    """Settings of ``budgeted``, besides those that all policies share.

    ``soft_hold_s``: after its KV was read in full for a next turn, a holding yields
    last for so long, once, or until that turn was admitted here.

    ``tenant_quotas`` maps tenants to fractions of the budget.
    ``default_tenant_quota`` is the fraction of each tenant that is not listed, as
    long as the listed ones leave so much, and an equal part of that when there
    are more; with 0 those share what the listed ones leave.  Without any quota
    all tenants compete by value alone.
    """

    soft_hold_s: float = 30.0
    tenant_quotas: Mapping[str, float] = field(default_factory=dict)
    default_tenant_quota: float = 0.0

    def __post_init__(self) -> None:
        # Named explicitly: super() does not find its class in a slotted dataclass.
        BudgetOptions.__post_init__(self)
        require_range("soft_hold_s", self.soft_hold_s, 0, 86400)
        require_range("default_tenant_quota", self.default_tenant_quota, 0, 1)
        for tenant, quota in self.tenant_quotas.items():
            require_range(f"tenant_quotas[{tenant}]", quota, 1e-6, 1)
        total = sum(self.tenant_quotas.values())
        if total > 1 + 1e-9:
            raise ConfigError(f"tenant_quotas add up to {total:g}, more than the whole budget")


class RetainByValue(RetentionPolicy):
    """See the module."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        self.options = decode(ValueOptions, config or {}, where="retention_config")
        self.returns = ReturnModel()
        self._shares = Shares(
            self.options.tenant_quotas, self.options.default_tenant_quota, self._chance
        )
        self._pools = self._shares.pools
        self._budget = 0

    # -- questions ------------------------------------------------------------------

    def ttl_s(self, _holding: Holding, /) -> float:
        return self.options.decoder_kv_blocks_ttl

    def budget_blocks(self, cache_blocks: int, /) -> int:
        self._budget = self.options.blocks_of(cache_blocks)
        return self._budget

    def victim(self, now: float, claimant: Holding | None, /) -> Holding | None:
        shares = self._shares
        if not shares.used:
            pool = self._pools.get(TOGETHER)
            return pool.victim(now, soft_too=claimant is None) if pool else None
        if claimant is None:
            return shares.first(-math.inf, lambda pool: pool.victim(now, soft_too=True))
        own = shares.of(claimant.tenant)
        # Others only lose to a claimant what is over their share.
        over = max(self._budget, shares.load(own))
        found = shares.first(over, lambda pool: pool.victim(now, soft_too=False))
        return found or own.victim(now, soft_too=False)

    # -- events ---------------------------------------------------------------------

    def added(self, holding: Holding, now: float, /) -> None:
        pool = self._shares.of(holding.tenant)
        holding.policy_data = entry = self._entry(holding, pool, now)
        pool.holdings += 1
        pool.blocks += holding.alone
        pool.add(holding, entry)
        self._shares.changed(pool)

    def removed(self, holding: Holding, /) -> None:
        entry: Entry = holding.policy_data
        pool = self._pools[entry.pool]
        pool.discard(holding, entry)
        holding.policy_data = None
        pool.holdings -= 1
        pool.blocks -= holding.alone
        self._shares.changed(pool)

    def pinned(self, holding: Holding, /) -> None:
        entry: Entry = holding.policy_data
        self._pools[entry.pool].discard(holding, entry)

    def unpinned(self, holding: Holding, now: float, /) -> None:
        before: Entry = holding.policy_data
        pool = self._pools[before.pool]
        holding.policy_data = entry = self._entry(holding, pool, now)
        entry.soft_until_s = before.soft_until_s
        if holding.returned and not entry.soft_until_s:
            # Once: others that read its beginning don't say that its turn is on its way.
            entry.soft_until_s = now + self.options.soft_hold_s
        if entry.soft_until_s > now:
            pool.add_soft(holding)
        else:
            pool.add(holding, entry)

    def admitted(self, holding: Holding, now: float, /) -> None:
        entry: Entry = holding.policy_data
        entry.soft_until_s = min(entry.soft_until_s, now)
        self._pools[entry.pool].harden(holding, entry)

    def returned(self, holding: Holding, age_s: float, /) -> None:
        self.returns.returned(holding.turns, age_s)

    def lapsed(self, holding: Holding, age_s: float, /) -> None:
        self.returns.lapsed(holding.turns, age_s)

    def describe(self) -> dict[str, Any]:
        shares = self._shares
        most = heapq.nlargest(16, self._pools.values(), key=shares.load)
        shown = {
            shares.shown(pool): {"blocks": pool.blocks, "share": round(shares.share(pool), 4)}
            for pool in most
        }
        returns = self.returns.describe(self.options.decoder_kv_blocks_ttl)
        return {"policy": "budgeted", "returns": returns, "tenants": shown}

    # -- value ----------------------------------------------------------------------

    def _entry(self, holding: Holding, pool: Pool, now: float) -> Entry:
        # A holding that was returned to waits for the turn after that one.
        turns = holding.turns + holding.returned
        saved_s = holding.saved_s
        if not 0.0 < saved_s < math.inf:
            saved_s = holding.tokens * _UNKNOWN_TOKEN_S
        density = saved_s / (holding.nbytes or 1)
        # The exponent of the square: one queue per factor of 1.4.
        key = CLASSES * math.frexp(density * density)[1] + class_of(turns)
        return Entry(pool.name, key, density, now)

    def _chance(self, holding: Holding, entry: Entry, now: float) -> float:
        return self.returns.chance(entry.key % CLASSES, now - entry.used_s, holding.expires_s - now)
