"""A cost model with known rates and a clock, and questions for it."""

from __future__ import annotations

from kvtransport.policy.cost_model import CostModel
from kvtransport.policy.recompute import PullQuestion

TOKEN_NBYTES = 131072

# An engine that computes 20,000 tokens/s and a link of 10 GB/s.
RATES = {
    "pull_fixed_s": 0.02,
    "pull_descriptor_s": 2e-6,
    "pull_bytes_per_s": 1e10,
    "compute_step_s": 0.005,
    "compute_token_s": 5e-5,
    "compute_pair_s": 1e-9,
    "explore_after_s": 0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(tokens: int, **more: object) -> PullQuestion:
    fields = {"nbytes": tokens * TOKEN_NBYTES, "descriptors": tokens // 16, "peer": "d/1"}
    return PullQuestion(tokens_beyond_local=tokens, **{**fields, **more})


def model(**config: object) -> CostModel:
    return CostModel({**RATES, **config}, clock=Clock())
