"""Retention: what a finished sequence's blocks are worth keeping for, and for how long.

Architecture
    The ledger owns holdings and enforces the rules that are never negotiable:
    a leased block is not given up, a handoff does not yield to pressure, the
    budget is never exceeded.  A policy only answers three questions: for how
    long to keep a holding, how many blocks retained holdings may occupy, and
    which holding to give up next.

Implementor contracts
    The ledger calls a policy under its lock: methods must be quick, must not
    block and must not call the ledger.  ``victim`` returns a holding that was
    passed to ``added`` (or ``unpinned``) and not since to ``removed`` (or
    ``pinned``); the ledger answers with ``removed``.  Every operation should be
    O(log n) or better in the number of holdings.  ``holding.policy_data`` is the
    policy's to use, but must not lead back to the holding: the garbage collector
    does not look into holdings.

Third parties
    A policy class found under the entry-point group ``kvtransport.retention``
    can be chosen by its entry-point name.  It is called with its configuration
    as one mapping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtransport.config import decode
from kvtransport.policy.options import load_named, require_range

if TYPE_CHECKING:
    from kvtransport.lease.holding import Holding

ENTRY_POINT_GROUP = "kvtransport.retention"

MOST_TTL_S = 7 * 86400


class RetentionPolicy(ABC):
    """How long to keep a holding, and in which order to give holdings up."""

    @abstractmethod
    def ttl_s(self, holding: Holding, /) -> float:
        """Seconds to keep ``holding`` without being asked for it; 0 refuses it."""

    @abstractmethod
    def budget_blocks(self, cache_blocks: int, /) -> int:
        """Most blocks that retained holdings may occupy of a cache of ``cache_blocks``."""

    @abstractmethod
    def added(self, holding: Holding, now: float, /) -> None:
        """The ledger took the holding; it may be given up from now on."""

    @abstractmethod
    def removed(self, holding: Holding, /) -> None:
        """The ledger no longer keeps the holding, pinned or not."""

    @abstractmethod
    def pinned(self, holding: Holding, /) -> None:
        """The first live lease began: the holding must not be a victim."""

    @abstractmethod
    def unpinned(self, holding: Holding, now: float, /) -> None:
        """The last lease ended: the holding may be given up again."""

    @abstractmethod
    def victim(self, now: float, claimant: Holding | None, /) -> Holding | None:
        """The holding to give up next.

        ``claimant`` is the new holding that needs the room, already counted by
        ``added``; ``None`` means that live requests need it.  Returning ``None``
        means that nothing may be given up for this claimant; returning
        ``claimant`` itself means that it is worth the least.
        """

    def returned(self, holding: Holding, age_s: float, /) -> None:  # noqa: B027  # optional to override
        """A holding was asked for in full for the first time, ``age_s`` after it was made."""

    def lapsed(self, holding: Holding, age_s: float, /) -> None:  # noqa: B027  # optional to override
        """A holding that nobody had asked for in full was dropped at this age."""

    def admitted(self, holding: Holding, now: float, /) -> None:  # noqa: B027  # optional to override
        """The next turn of the holding's conversation was admitted on this engine."""

    def describe(self) -> dict[str, Any]:
        """Plain values for ``kvt status``."""
        return {"policy": type(self).__name__}


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """Settings shared by policies that keep anything.

    ``decoder_kv_blocks_ttl`` seconds is upstream's name and default.  The
    budget is the smaller of ``budget_fraction`` of the KV cache and
    ``budget_blocks`` (0: no absolute limit).
    """

    decoder_kv_blocks_ttl: float = 480.0
    budget_fraction: float = 0.5
    budget_blocks: int = 0

    def __post_init__(self) -> None:
        require_range("decoder_kv_blocks_ttl", self.decoder_kv_blocks_ttl, 0, MOST_TTL_S)
        require_range("budget_fraction", self.budget_fraction, 0, 1)
        require_range("budget_blocks", self.budget_blocks, 0, 2**31 - 1)

    def blocks_of(self, cache_blocks: int) -> int:
        blocks = int(cache_blocks * self.budget_fraction)
        return min(blocks, self.budget_blocks) if self.budget_blocks else blocks


class RetainNothing(RetentionPolicy):
    """``off``: every finished sequence's blocks go back at once."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        decode(BudgetOptions, config or {}, where="retention_config")

    def ttl_s(self, _holding: Holding, /) -> float:
        return 0.0

    def budget_blocks(self, _cache_blocks: int, /) -> int:
        return 0

    def added(self, _holding: Holding, _now: float, /) -> None:
        pass

    def removed(self, _holding: Holding, /) -> None:
        pass

    def pinned(self, _holding: Holding, /) -> None:
        pass

    def unpinned(self, _holding: Holding, _now: float, /) -> None:
        pass

    def victim(self, _now: float, _claimant: Holding | None, /) -> Holding | None:
        return None


class RetainForTtl(RetentionPolicy):
    """``ttl``: keep everything for a fixed time; least recently used goes first."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        self.options = decode(BudgetOptions, config or {}, where="retention_config")
        self._order: OrderedDict[int, Holding] = OrderedDict()

    def ttl_s(self, _holding: Holding, /) -> float:
        return self.options.decoder_kv_blocks_ttl

    def budget_blocks(self, cache_blocks: int, /) -> int:
        return self.options.blocks_of(cache_blocks)

    def added(self, holding: Holding, _now: float, /) -> None:
        self._order[holding.holding_id] = holding

    def removed(self, holding: Holding, /) -> None:
        self._order.pop(holding.holding_id, None)

    pinned = removed

    def unpinned(self, holding: Holding, _now: float, /) -> None:
        self._order[holding.holding_id] = holding

    def victim(self, _now: float, _claimant: Holding | None, /) -> Holding | None:
        return next(iter(self._order.values()), None)


def load_retention(name: str, config: Mapping[str, object] | None = None) -> RetentionPolicy:
    """Make the policy called ``name``: ``off``, ``ttl``, ``budgeted`` or an entry point.

    Raises ``ConfigError`` for an unknown name, naming the nearest, and for
    unknown or impossible settings in ``config``.
    """
    from kvtransport.policy.budgeted import RetainByValue

    own = {"off": RetainNothing, "ttl": RetainForTtl, "budgeted": RetainByValue}
    return load_named("retention", name, own, ENTRY_POINT_GROUP, RetentionPolicy, config or {})
