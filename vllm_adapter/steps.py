"""How long this engine's own steps take, and how much work waits for them.

The recompute policy prices computing with these observations.  Times are taken
in the scheduler's thread, from the plan of a step to its processed output; with
steps in flight one behind another, a step's time begins where the previous
one's ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtransport.policy.recompute import RecomputePolicy

_MOST_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step; ``prefill`` when some request computes more than one token.

    ``pulling`` when a pull was under way, so that its output may tell of an end.
    """

    began_s: float
    tokens: int
    context_tokens: int
    attention_pairs: float
    prefill: bool
    pulling: bool


class StepClock:
    """Follows one engine's steps.  Scheduler thread only."""

    def __init__(self, policy: RecomputePolicy) -> None:
        self._policy = policy
        self._in_flight: deque[Step] = deque(maxlen=_MOST_IN_FLIGHT)
        self._last_end_s = 0.0
        self.requests = 0
        """Requests in the latest step."""

    @property
    def awaited(self) -> bool:
        """Whether a step in flight computes something or may end a pull."""
        return any(step.tokens or step.pulling for step in self._in_flight)

    def began(
        self, output: SchedulerOutput, live: dict[str, Request], *, pulling: bool = False
    ) -> None:
        """A step was planned; ``num_computed_tokens`` are still those before it."""
        scheduled = output.num_scheduled_tokens
        self.requests = len(scheduled)
        context, pairs, prefill = 0, 0.0, False
        for request_id, count in scheduled.items():
            request = live.get(request_id)
            if request is not None:
                computed = request.num_computed_tokens
                context += computed
                pairs += count * (computed + count / 2)
                prefill = prefill or count > 1
        self._in_flight.append(
            Step(
                time.monotonic(),
                output.total_num_scheduled_tokens,
                context,
                pairs,
                prefill,
                pulling,
            )
        )

    def ended(self) -> float | None:
        """The oldest step's output was processed.

        Returns predicted over actual time of a prefill step that the policy has
        a price for.
        """
        if not self._in_flight:
            return None
        step = self._in_flight.popleft()
        now = time.monotonic()
        seconds = now - max(step.began_s, self._last_end_s)
        self._last_end_s = now
        # Steps of single tokens say nothing about the cost of a prompt.
        if not step.prefill or not step.tokens:
            return None
        return self._policy.observe_step(
            tokens=step.tokens,
            context_tokens=step.context_tokens,
            seconds=seconds,
            attention_pairs=step.attention_pairs,
        )


def waiting_work(
    live: Iterable[Request], last: Request, undecided: Callable[[Request], bool]
) -> tuple[int, float]:
    """Prompt tokens to compute before this engine gets to ``last``, and their attention pairs.

    ``live`` is in order of arrival.  ``undecided`` requests may still pull their
    prompts, so they don't count.
    """
    tokens, pairs = 0, 0.0
    for request in takewhile(lambda request: request is not last, live):
        computed = request.num_computed_tokens
        count = request.num_prompt_tokens - computed
        if count > 0 and not undecided(request):
            tokens += count
            pairs += count * (computed + count / 2)
    return tokens, pairs
