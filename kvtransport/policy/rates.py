"""What pulling and computing cost, as a few numbers that can be looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass


def _all_sane(*values: float, most: float) -> bool:
    return all(math.isfinite(value) and 0 <= value <= most for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRates:
    """Seconds per pull, per descriptor and per byte."""

    fixed_s: float = 0.0
    descriptor_s: float = 0.0
    byte_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Finite, not negative, and neither faster nor slower than any real link."""
        return (
            _all_sane(self.fixed_s, most=60.0)
            and _all_sane(self.descriptor_s, most=1.0)
            and _all_sane(self.byte_s, most=1e-3)
            and (self.byte_s >= 1e-15 or self.descriptor_s >= 1e-12)
        )

    def seconds(self, *, nbytes: float, descriptors: float) -> float:
        """Predicted time of one pull."""
        return self.fixed_s + self.descriptor_s * descriptors + self.byte_s * nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRates:
    """Seconds per step, per token, and per pair of tokens that attend to each other.

    ``chunk_tokens`` is the most tokens that one step computes.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    chunk_tokens: int = 8192

    @property
    def usable(self) -> bool:
        """Finite, not negative, and neither faster nor slower than any real engine."""
        return (
            _all_sane(self.step_s, most=60.0)
            and _all_sane(self.token_s, most=10.0)
            and _all_sane(self.pair_s, most=1.0)
            and (self.token_s >= 1e-12 or self.pair_s >= 1e-18 or self.step_s >= 1e-9)
        )

    def seconds(self, tokens: float, context: float = 0.0) -> float:
        """Predicted time to compute ``tokens`` behind ``context`` tokens."""
        return self.work_seconds(tokens, tokens * (context + tokens / 2))

    def work_seconds(self, tokens: float, pairs: float) -> float:
        """Predicted time to compute tokens of several requests, with their attention pairs."""
        steps = max(1.0, math.ceil(tokens / self.chunk_tokens))
        return self.step_s * steps + self.token_s * tokens + self.pair_s * pairs


def break_even_tokens(
    pull: PullRates,
    compute: ComputeRates,
    *,
    token_nbytes: float,
    descriptors_per_token: float,
    context: float = 0.0,
    most: int = 2**20,
) -> int | None:
    """Fewest tokens from which on an idle engine is faster to pull; ``None``: never.

    A pull ends with one step of its own, for the last token.
    """

    def pays(tokens: int) -> bool:
        pulled = pull.seconds(
            nbytes=token_nbytes * tokens, descriptors=max(1.0, descriptors_per_token * tokens)
        )
        return pulled + compute.step_s <= compute.seconds(tokens, context)

    if not pays(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if pays(middle):
            high = middle
        else:
            low = middle
    return high
