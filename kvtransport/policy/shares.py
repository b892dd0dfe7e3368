"""Which tenant is furthest over its share of the budget.

Architecture
    Every listed tenant has a pool and a fixed share.  The others have a pool each,
    with the default share, or one pool together.  Their number is nobody's
    choice but theirs, so together they never get more than the listed ones
    leave: the more there are, the smaller the share of each.  The others all
    have one share, so their order does not depend on it, and the pool furthest
    over its share is the first of one of two orders.

Threading
    None of its own; the ledger's lock covers it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvtransport.policy.pools import Chance, Pool

if TYPE_CHECKING:
    from kvtransport.lease.holding import Holding

TOGETHER = ""
"""Name of the pool of all who have none of their own."""

_LEAST = 1e-6


class _Order:
    """Pools by load, the largest first; every operation is O(log n)."""

    def __init__(self) -> None:
        self.pools: dict[str, Pool] = {}
        self._heap: list[tuple[float, str]] = []

    def put(self, pool: Pool) -> None:
        """Add a pool, or note that its load has changed."""
        self.pools[pool.name] = pool
        heapq.heappush(self._heap, (-pool.load, pool.name))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self.pools):
            self._heap = [(-known.load, name) for name, known in self.pools.items()]
            heapq.heapify(self._heap)

    def first(self) -> Pool | None:
        while self._heap:
            load, name = self._heap[0]
            pool = self.pools.get(name)
            if pool is not None and pool.load == -load:
                return pool
            heapq.heappop(self._heap)
        return None

    def skip(self, pool: Pool) -> None:
        """Leave the first pool out until it is ``put`` again."""
        while self._heap and self._heap[0][1] == pool.name:
            heapq.heappop(self._heap)


class Shares:
    """The pools of all tenants."""

    def __init__(self, quotas: Mapping[str, float], default: float, chance: Chance) -> None:
        self.pools: dict[str, Pool] = {}
        self._quotas = quotas
        self._default = default
        self._rest = max(_LEAST, 1.0 - sum(quotas.values()))
        self._chance = chance
        self._listed = _Order()
        self._others = _Order()
        self.used = bool(quotas) or default > 0

    def of(self, tenant: str) -> Pool:
        """The tenant's pool, made when it is missing."""
        name = self._name(tenant) if self.used else TOGETHER
        pool = self.pools.get(name)
        if pool is None:
            weight = self._quotas.get(tenant, 1.0) if name else 1.0
            pool = self.pools[name] = Pool(name, weight, self._chance)
        return pool

    def shown(self, pool: Pool) -> str:
        """What status pages call it: the tenant's name, or who it is for in brackets."""
        if pool.name == TOGETHER:
            return "(others)" if self._quotas else "(all)"
        return pool.name[1:] or "(no tenant)"

    def changed(self, pool: Pool) -> None:
        """Its number of blocks has changed."""
        if not self.used:
            return
        order = self._order(pool)
        if pool.holdings:
            order.put(pool)
        else:
            order.pools.pop(pool.name, None)
            del self.pools[pool.name]

    def share(self, pool: Pool) -> float:
        """The fraction of the budget that is the pool's own."""
        if self._order(pool) is self._listed:
            return pool.weight
        return min(self._default or 1.0, self._rest / max(1, len(self._others.pools)))

    def load(self, pool: Pool) -> float:
        """The size of the budget in which its blocks would be just its share."""
        return pool.blocks / self.share(pool)

    def first(self, above: float, take: Callable[[Pool], Holding | None]) -> Holding | None:
        """What ``take`` finds in the pool with the largest load, or else in the next ones.

        Only pools whose load is larger than ``above`` are looked at.
        """
        passed = []
        found = None
        while found is None and (pool := self._first()) is not None and self.load(pool) > above:
            found = take(pool)
            self._order(pool).skip(pool)
            passed.append(pool)
        for pool in passed:
            self._order(pool).put(pool)
        return found

    def _first(self) -> Pool | None:
        pools = [pool for pool in (self._listed.first(), self._others.first()) if pool]
        return max(pools, key=self.load, default=None)

    def _order(self, pool: Pool) -> _Order:
        return self._listed if pool.name[1:] in self._quotas and pool.name else self._others

    def _name(self, tenant: str) -> str:
        if self._default > 0 or tenant in self._quotas:
            # The mark keeps a tenant's name from meaning the pool of all others.
            return "=" + tenant
        return TOGETHER
