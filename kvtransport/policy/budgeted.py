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

if TYPE_CHECKING:
    from kvtransport.lease.holding import Holding

_UNKNOWN_TOKEN_S = 1e-4
"""Compute time per token while nothing better is known; only ratios matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions(BudgetOptions):
    """Settings of ``budgeted``, besides those that all policies share.

    ``soft_hold_s``: after its KV was read for a next turn, a holding yields last
    for so long, or until that turn was admitted here.

    ``tenant_quotas`` maps tenants to fractions of the budget.
    ``default_tenant_quota`` is the fraction of each tenant that is not listed;
    with 0 those share what the listed ones leave.  Without any quota all tenants
    compete by value alone.
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
        self._pools: dict[str, Pool] = {}
        self._loads: list[tuple[float, str]] = []
        self._budget = 0
        quotas = self.options.tenant_quotas
        self._with_quotas = bool(quotas) or self.options.default_tenant_quota > 0
        self._rest = max(1e-6, 1.0 - sum(quotas.values()))

    # -- questions ------------------------------------------------------------------

    def ttl_s(self, _holding: Holding, /) -> float:
        return self.options.decoder_kv_blocks_ttl

    def budget_blocks(self, cache_blocks: int, /) -> int:
        self._budget = self.options.blocks_of(cache_blocks)
        return self._budget

    def victim(self, now: float, claimant: Holding | None, /) -> Holding | None:
        if not self._with_quotas:
            pool = self._pools.get("")
            return pool.victim(now, soft_too=claimant is None) if pool else None
        own = self._pool(claimant) if claimant is not None else None
        seen: list[tuple[float, str]] = []
        found: Holding | None = None
        while found is None and (pool := self._next_by_load(seen)) is not None:
            # Another tenant only loses to a claimant what is over its share.
            if own is None or pool is own or pool.load > max(self._budget, own.load):
                found = pool.victim(now, soft_too=claimant is None)
        for item in seen:
            heapq.heappush(self._loads, item)
        return found

    # -- events ---------------------------------------------------------------------

    def added(self, holding: Holding, now: float, /) -> None:
        pool = self._pool(holding)
        holding.policy_data = entry = self._entry(holding, pool, now)
        pool.blocks += holding.blocks
        pool.add(holding, entry)
        if self._with_quotas:
            self._load_changed(pool)

    def removed(self, holding: Holding, /) -> None:
        entry: Entry = holding.policy_data
        pool = self._pools[entry.pool]
        pool.discard(holding, entry)
        holding.policy_data = None
        pool.blocks -= holding.blocks
        if not self._with_quotas:
            return
        if pool.blocks:
            self._load_changed(pool)
        else:
            del self._pools[pool.name]

    def pinned(self, holding: Holding, /) -> None:
        entry: Entry = holding.policy_data
        self._pools[entry.pool].discard(holding, entry)

    def unpinned(self, holding: Holding, now: float, /) -> None:
        pool = self._pools[holding.policy_data.pool]
        holding.policy_data = entry = self._entry(holding, pool, now)
        if holding.returned and self.options.soft_hold_s > 0:
            pool.add_soft(holding, entry, now + self.options.soft_hold_s)
        else:
            pool.add(holding, entry)

    def admitted(self, holding: Holding, _now: float, /) -> None:
        entry: Entry = holding.policy_data
        self._pools[entry.pool].harden(holding, entry)

    def returned(self, holding: Holding, age_s: float, /) -> None:
        self.returns.returned(holding.turns, age_s)

    def lapsed(self, holding: Holding, age_s: float, /) -> None:
        self.returns.lapsed(holding.turns, age_s)

    def describe(self) -> dict[str, Any]:
        most = heapq.nlargest(16, list(self._pools.items()), key=lambda item: item[1].load)
        shares = {
            key or "(all)": {"blocks": pool.blocks, "share": round(pool.weight, 4)}
            for key, pool in most
        }
        returns = self.returns.describe(self.options.decoder_kv_blocks_ttl)
        return {"policy": "budgeted", "returns": returns, "tenants": shares}

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

    # -- pools ----------------------------------------------------------------------

    def _pool(self, holding: Holding) -> Pool:
        name = self._pool_name(holding.tenant) if self._with_quotas else ""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = Pool(name, self._weight(name), self._chance)
        return pool

    def _pool_name(self, tenant: str) -> str:
        options = self.options
        if options.default_tenant_quota > 0 or tenant in options.tenant_quotas:
            # The mark keeps a tenant's name from meaning the pool of all others.
            return "=" + tenant
        return ""

    def _weight(self, name: str) -> float:
        options = self.options
        if not name:
            return self._rest
        return options.tenant_quotas.get(name[1:], options.default_tenant_quota)

    def _load_changed(self, pool: Pool) -> None:
        heapq.heappush(self._loads, (-pool.load, pool.name))
        if len(self._loads) > 64 and len(self._loads) > 4 * len(self._pools):
            self._loads = [(-known.load, name) for name, known in self._pools.items()]
            heapq.heapify(self._loads)

    def _next_by_load(self, seen: list[tuple[float, str]]) -> Pool | None:
        """The pool furthest over its share besides those in ``seen``; adds it to them."""
        while self._loads:
            load, name = heapq.heappop(self._loads)
            pool = self._pools.get(name)
            if pool is not None and -load == pool.load and (not seen or seen[-1] != (load, name)):
                seen.append((load, name))
                return pool
        return None
