"""Holdings in order of what giving them up would cost.

Architecture
    A *pool* holds what may be given up of one tenant (or of all, without
    quotas).  In a pool, holdings of one turn class and about the same saving
    per byte are in one queue in order of last use; because the chance of a
    return before expiry only falls with age, the head of a queue is its least
    valuable holding, and the least valuable of all is one of the heads.  So
    a victim costs a look at a few dozen heads, whatever the number of holdings.

    Holdings whose next turn is just being prepared elsewhere are *soft*: they
    go last.

Threading
    None of its own; the ledger's lock covers it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvtransport.lease.holding import Holding

Key = int
"""Order of magnitude of the saving per byte, times ``CLASSES``, plus the turn class."""

Queue = OrderedDict[int, "Holding"]

_FRESH_S = 0.25
"""For how long a head's value is good enough, and how far apart two holdings may be
in time and still have the same chance."""


class Entry(msgspec.Struct, gc=False):
    """A holding's place in its pool; its ``policy_data``.

    ``density`` is what its return would save, in seconds per byte; ``used_s`` is
    when its idle time began.  Until ``soft_until_s`` it is soft, if it is that at all.

    Numbers and names only: a hundred thousand of these are nothing that the
    garbage collector has to visit.
    """

    pool: str
    key: Key
    density: float
    used_s: float
    soft_until_s: float = 0.0


Chance = Callable[["Holding", Entry, float], float]
"""Of a return before the holding expires, now."""


class Pool:
    """What may be given up of one tenant, and how much the tenant has in all.

    ``blocks`` that several of its ``holdings`` share count once.  (Tenants share
    none with each other: KV of one is never used for another.)
    """

    __slots__ = (
        "_chance",
        "_chances",
        "_changed",
        "_heads",
        "_heads_at",
        "_queues",
        "_soft",
        "blocks",
        "holdings",
        "name",
        "weight",
    )

    def __init__(self, name: str, weight: float, chance: Chance) -> None:
        self.name = name
        self.weight = weight
        self.blocks = 0
        self.holdings = 0
        self._chance = chance
        self._queues: dict[Key, Queue] = {}
        self._soft: Queue = OrderedDict()
        self._heads: dict[Key, float] = {}
        self._chances: dict[Key, tuple[float, float, float]] = {}
        self._changed: set[Key] = set()
        self._heads_at = -math.inf

    @property
    def load(self) -> float:
        """Blocks in proportion to the pool's weight."""
        return self.blocks / self.weight

    def add(self, holding: Holding, entry: Entry) -> None:
        """May be given up in its turn."""
        queue = self._queues.get(entry.key)
        if queue is None:
            queue = self._queues[entry.key] = OrderedDict()
            self._changed.add(entry.key)
        queue[holding.holding_id] = holding

    def add_soft(self, holding: Holding) -> None:
        """May be given up only when nothing else is left, until its time."""
        self._soft[holding.holding_id] = holding

    def harden(self, holding: Holding, entry: Entry) -> None:
        """A soft holding may be given up in its turn again."""
        if self._soft.pop(holding.holding_id, None) is not None:
            self.add(holding, entry)

    def discard(self, holding: Holding, entry: Entry) -> None:
        """May not be given up (any more); does nothing when it is not there."""
        holding_id = holding.holding_id
        if self._soft and self._soft.pop(holding_id, None) is not None:
            return
        queue = self._queues.get(entry.key)
        if queue is None:
            return
        first = next(iter(queue))
        try:
            del queue[holding_id]
        except KeyError:
            return
        if first == holding_id:
            self._changed.add(entry.key)
        if not queue:
            del self._queues[entry.key]

    def victim(self, now: float, *, soft_too: bool) -> Holding | None:
        """The least valuable holding."""
        while self._soft:
            holding = next(iter(self._soft.values()))
            entry: Entry = holding.policy_data
            if entry.soft_until_s > now:
                break
            self.harden(holding, entry)
        if self._queues:
            return self._least(now)
        if self._soft and soft_too:
            return next(iter(self._soft.values()))
        return None

    def _least(self, now: float) -> Holding:
        queues, heads, changed = self._queues, self._heads, self._changed
        if not 0 <= now - self._heads_at < _FRESH_S:
            self._heads_at = now
            changed.update(queues)
            self._chances.clear()
        while changed:
            key = changed.pop()
            queue = queues.get(key)
            if queue is None:
                heads.pop(key, None)
            else:
                heads[key] = self._value(next(iter(queue.values())), now)
        queue = queues[min(heads, key=heads.__getitem__)]
        return next(iter(queue.values()))

    def _value(self, holding: Holding, now: float) -> float:
        """Expected saving in seconds per byte."""
        entry: Entry = holding.policy_data
        used_s, expires_s = entry.used_s, holding.expires_s
        known = self._chances.get(entry.key)
        if (
            known is None
            or abs(known[0] - used_s) > _FRESH_S
            or abs(known[1] - expires_s) > _FRESH_S
        ):
            known = used_s, expires_s, self._chance(holding, entry, now)
            self._chances[entry.key] = known
        return known[2] * entry.density
