"""Policies as somebody else would write them, found through entry points."""

from __future__ import annotations

from collections.abc import Mapping

from kvtransport.lease.holding import Holding
from kvtransport.policy.recompute import Decision, PullQuestion, RecomputePolicy
from kvtransport.policy.retention import RetainForTtl


class Coin(RecomputePolicy):
    """Pulls what has an even number of tokens."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = dict(config)

    def decide(self, question: PullQuestion, /) -> Decision:
        return Decision(question.tokens_beyond_local % 2 == 0, "coin")


class NewestFirst(RetainForTtl):
    """Gives up what came last."""

    def victim(self, _now: float, _claimant: Holding | None, /) -> Holding | None:
        return next(reversed(self._order.values()), None)
