"""Recompute: pull a prefix's KV from a peer, or compute it here.

Architecture
    The adapter asks one question per candidate pull and follows the decision.
    Policies that learn are told what transfers and steps really took.

Implementor contracts
    ``decide`` runs in the scheduler's thread: no waiting, no I/O.

Third parties
    A policy class found under the entry-point group ``kvtransport.recompute``
    can be chosen by its entry-point name.  It is called with its configuration
    as one mapping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtransport.config import decode
from kvtransport.policy.options import load_named, require_range

ENTRY_POINT_GROUP = "kvtransport.recompute"

Direction = Literal["prefill_to_decode", "decode_to_prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullQuestion:
    """One candidate pull.

    ``tokens_beyond_local`` would be pulled, on top of ``local_tokens`` that
    this engine's own prefix cache has.  ``descriptors`` and ``nbytes`` describe
    the transfer, 0 when unknown.  ``peer`` names the engine by its place (a
    configured name or an address), which outlives restarts; what follows its
    last slash, the incarnation, does not matter for cost.
    ``load_tokens`` prompt tokens wait or run here before this request, with
    ``load_pairs`` pairs of tokens that attend to each other within their prompts.
    ``queued_nbytes`` are already being pulled from the peer.
    """

    tokens_beyond_local: int
    local_tokens: int = 0
    descriptors: int = 0
    nbytes: int = 0
    peer: str = ""
    direction: Direction = "decode_to_prefill"
    load_tokens: int = 0
    load_pairs: float = 0.0
    queued_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Pull or compute, why, and what either was expected to take (NaN: unknown).

    ``predicted_pull_s`` is the transfer with what is queued before it,
    ``predicted_compute_s`` the computation alone, ``predicted_wait_s`` what this
    engine has to compute before it gets to the request.
    """

    pull: bool
    reason: str
    predicted_pull_s: float = float("nan")
    predicted_compute_s: float = float("nan")
    predicted_wait_s: float = float("nan")


class RecomputePolicy(ABC):
    """Decides between pulling and computing; may learn from what happened."""

    @abstractmethod
    def decide(self, question: PullQuestion, /) -> Decision:
        """Choose between pulling and computing the tokens of ``question``."""

    def observe_transfer(  # noqa: B027  # optional to override
        self,
        *,
        peer: str,
        nbytes: int,
        descriptors: int,
        seconds: float,
        first_contact: bool = False,
    ) -> None:
        """A pull from ``peer`` took ``seconds`` from decision to usable KV.

        ``nbytes`` includes what was queued at the peer before it
        (``PullQuestion.queued_nbytes``): the pull waited for that too.
        """

    def pull_started(self, *, peer: str) -> None:  # noqa: B027  # optional to override
        """The pull that ``decide`` chose has begun.

        Without this a request that has no memory yet asks again later.
        """

    def observe_step(
        self,
        *,
        tokens: int,  # noqa: ARG002  # a default
        context_tokens: int,  # noqa: ARG002
        seconds: float,  # noqa: ARG002
        attention_pairs: float | None = None,  # noqa: ARG002
    ) -> float | None:
        """One engine step computed ``tokens`` new tokens on top of ``context_tokens``.

        ``attention_pairs`` is the sum over requests of new x (context + new / 2);
        without it the step is taken for one request.  Returns predicted over
        actual time, ``None`` without a prediction.
        """
        return None

    def compute_seconds(self, tokens: int, /) -> float:  # noqa: ARG002  # a default
        """How long this engine would compute a prompt of ``tokens``; 0 when unknown."""
        return 0.0

    def describe(self) -> dict[str, Any]:
        """Plain values for ``kvt status``."""
        return {"policy": type(self).__name__}

    def close(self) -> None:  # noqa: B027  # optional to override
        """Save what was learned."""


class AlwaysPull(RecomputePolicy):
    """``always_pull``: whatever a peer holds beyond the local hit is pulled."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        decode(NoOptions, config or {}, where="recompute_config")

    def decide(self, question: PullQuestion, /) -> Decision:
        return Decision(question.tokens_beyond_local > 0, "always_pull")


class NeverPull(RecomputePolicy):
    """``never_pull``: always compute."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        decode(NoOptions, config or {}, where="recompute_config")

    def decide(self, _question: PullQuestion, /) -> Decision:
        return Decision(False, "never_pull")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """No settings; any key is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdOptions:
    """Tokens beyond the local hit below which this engine computes.

    ``kv_recompute_threshold`` is upstream's name and default, and as there it
    is for prefill engines.  A decode engine that computes a prompt's rest
    delays everybody's next token, so ``handoff_threshold`` is 0: it pulls.
    """

    kv_recompute_threshold: int = 64
    handoff_threshold: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_recompute_threshold", "handoff_threshold"):
            require_range(name, getattr(self, name), 0, 2**31 - 1)

    def tokens(self, direction: Direction) -> int:
        """The threshold for one direction."""
        handoff = direction == "prefill_to_decode"
        return self.handoff_threshold if handoff else self.kv_recompute_threshold


class Threshold(RecomputePolicy):
    """``threshold``: pull from so many tokens beyond the local hit on."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        self.options = decode(ThresholdOptions, config or {}, where="recompute_config")

    def decide(self, question: PullQuestion, /) -> Decision:
        beyond = question.tokens_beyond_local
        if 0 < beyond >= self.options.tokens(question.direction):
            return Decision(True, "threshold_reached")
        return Decision(False, "below_threshold")


def load_recompute(name: str, config: Mapping[str, object] | None = None) -> RecomputePolicy:
    """Make the policy called ``name``: ``always_pull``, ``never_pull``, ``threshold``,
    ``cost_model`` or an entry point.

    Raises ``ConfigError`` for an unknown name, naming the nearest, and for
    unknown or impossible settings in ``config``.
    """
    from kvtransport.policy.cost_model import CostModel

    own = {
        "always_pull": AlwaysPull,
        "never_pull": NeverPull,
        "threshold": Threshold,
        "cost_model": CostModel,
    }
    return load_named("recompute", name, own, ENTRY_POINT_GROUP, RecomputePolicy, config or {})
