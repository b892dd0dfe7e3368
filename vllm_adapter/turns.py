"""One request's way to reuse, from its arrival to the end of its pull.

::

    LOOKING <-> FOUND --> LOADING --> SETTLED
       |          |          ^
       +----------+----------+  (every way ends in SETTLED, exactly once)

It goes back to LOOKING when what was found was given back: once, because the
scheduler did not ask for long, and whenever the cache is reset.  It looks again
when it is asked.

A settled turn never promises tokens again: whatever happened, the rest is
computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from kvtransport_vllm import outcomes

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtransport.lease.digest import DigestChain
    from kvtransport.lease.held import HeldLease, Lookup
    from kvtransport_vllm.meta import BlockIds, PullReport

Direction = Literal["prefill_to_decode", "decode_to_prefill"]


class Phase(Enum):
    """Where a turn is; see the module's diagram."""

    LOOKING = "looking"
    FOUND = "found"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class Turn:
    """What the scheduler side knows of one request that may reuse KV."""

    request: Request
    direction: Direction
    phase: Phase = Phase.LOOKING
    handoff: tuple[str, str] = ("", "")
    """Engine and request that prefilled this one; empty when it was not."""
    conversation: str = ""
    """The router's name for it; empty when it gave none."""
    chain: DigestChain | None = None
    lookup: Lookup | None = None
    asked: bool = False
    """Whether a step of the scheduler has asked for the lookup's answer."""
    wanted_s: float = 0.0
    """When the scheduler asked last, or the request arrived; monotonic."""
    gave_back: bool = False
    """Whether it has given back what it found because the scheduler did not ask."""
    admitted: bool = False
    """Whether the scheduler has given it memory; later it may be preempted."""
    lease: HeldLease | None = None
    outcome: str = ""
    lookup_s: float = math.nan
    loading_since_s: float = 0.0
    local_tokens: int = 0
    planned_tokens: int = 0
    pulled_tokens: int = 0
    destination: BlockIds = ()
    pull_s: float = 0.0
    """From the allocation to the scheduler's knowledge that the pull ended."""
    report: PullReport | None = None
    aborted: bool = False
    decision: str = ""
    """The recompute policy's reason; empty while it was not asked."""
    predicted_pull_s: float = math.nan
    predicted_compute_s: float = math.nan
    queued_nbytes: int = 0
    """What was being pulled from the same engine when the policy decided."""

    @property
    def request_id(self) -> str:
        name: str = self.request.request_id
        return name

    def found(self, lease: HeldLease) -> None:
        self.lease = lease
        self.phase = Phase.FOUND

    @property
    def waits_with(self) -> HeldLease | None:
        """The lease that it keeps until the scheduler asks."""
        if self.lookup is not None:
            return self.lookup.result.lease if self.lookup.result is not None else None
        return self.lease if self.phase is Phase.FOUND else None

    def give_back(self) -> None:
        """Go back to LOOKING, with nothing in hand and no lookup under way."""
        if self.lookup is not None:
            self.lookup.cancel()
        elif self.lease is not None:
            self.lease.release(delivered=False)
        self.phase, self.lookup, self.lease, self.asked = Phase.LOOKING, None, None, False

    def settle(self, outcome: str, *, delivered: bool = False) -> None:
        """End the turn's reuse; its lease is given back, its lookup abandoned."""
        if self.phase is Phase.SETTLED:
            return
        self.phase = Phase.SETTLED
        self.outcome = outcome
        if self.lookup is not None:
            self.lookup.cancel()
            self.lookup = None
        if self.lease is not None:
            self.lease.release(delivered)

    def summary(self) -> dict[str, Any]:
        """What a router or an operator may see of it; no content, no addresses."""
        prompt = self.request.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "local_tokens": self.local_tokens,
            "pulled_tokens": self.pulled_tokens,
            "recomputed_tokens": prompt - self.local_tokens - self.pulled_tokens,
            "outcome": self.outcome or outcomes.DISABLED,
            "pull_s": round(self.pull_s, 6),
            "bytes": self.report.nbytes if self.report else 0,
            "descriptors": self.report.descriptors if self.report else 0,
        }
