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
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransport.lease.holding import Holding

Key = tuple[int, int]
"""Turn class, order of magnitude of the saving per byte."""

_FRESH_S = 0.25
"""For how long a head's value is good enough."""


@dataclass(slots=True, eq=False)
class Entry:
    """A holding's place in a pool; ``used_s`` is when its idle time began.

    ``queue`` is where it waits, ``None`` while it may not be given up.
    """

    holding: Holding
    pool: Pool
    key: Key
    used_s: float
    queue: OrderedDict[int, Entry] | None = None
    soft_until_s: float = 0.0


Value = Callable[[Entry, float], float]


class Pool:
    """What may be given up of one tenant, and how much the tenant has in all."""

    __slots__ = (
        "_changed",
        "_heads",
        "_heads_at",
        "_queues",
        "_soft",
        "_value",
        "blocks",
        "name",
        "weight",
    )

    def __init__(self, name: str, weight: float, value: Value) -> None:
        self.name = name
        self.weight = weight
        self.blocks = 0
        self._value = value
        self._queues: dict[Key, OrderedDict[int, Entry]] = {}
        self._soft: OrderedDict[int, Entry] = OrderedDict()
        self._heads: dict[Key, float] = {}
        self._changed: set[Key] = set()
        self._heads_at = -math.inf

    @property
    def load(self) -> float:
        """Blocks in proportion to the pool's share."""
        return self.blocks / self.weight

    def add(self, entry: Entry) -> None:
        """May be given up in its turn."""
        queue = self._queues.get(entry.key)
        if queue is None:
            queue = self._queues[entry.key] = OrderedDict()
            self._changed.add(entry.key)
        queue[entry.holding.holding_id] = entry
        entry.queue = queue

    def add_soft(self, entry: Entry, until_s: float) -> None:
        """May be given up only when nothing else is left, until then."""
        entry.soft_until_s = until_s
        self._soft[entry.holding.holding_id] = entry
        entry.queue = self._soft

    def harden(self, entry: Entry) -> None:
        """A soft holding may be given up in its turn again."""
        if entry.queue is self._soft:
            self.discard(entry)
            self.add(entry)

    def discard(self, entry: Entry) -> None:
        """May not be given up (any more); does nothing when it is not there."""
        queue, entry.queue = entry.queue, None
        if queue is None:
            return
        holding_id = entry.holding.holding_id
        if queue is self._soft:
            del queue[holding_id]
            return
        if next(iter(queue)) == holding_id:
            self._changed.add(entry.key)
        del queue[holding_id]
        if not queue:
            del self._queues[entry.key]

    def victim(self, now: float, *, soft_too: bool) -> Holding | None:
        """The least valuable holding."""
        while self._soft:
            entry = next(iter(self._soft.values()))
            if entry.soft_until_s > now:
                break
            self.harden(entry)
        if self._queues:
            return self._least(now)
        if self._soft and soft_too:
            return next(iter(self._soft.values())).holding
        return None

    def _least(self, now: float) -> Holding:
        queues, heads = self._queues, self._heads
        if not 0 <= now - self._heads_at < _FRESH_S:
            self._heads_at = now
            self._changed.update(queues)
        while self._changed:
            key = self._changed.pop()
            queue = queues.get(key)
            if queue is None:
                heads.pop(key, None)
            else:
                heads[key] = self._value(next(iter(queue.values())), now)
        queue = queues[min(heads, key=heads.__getitem__)]
        return next(iter(queue.values())).holding
