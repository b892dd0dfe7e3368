from __future__ import annotations

import math
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cost import TOKEN_NBYTES, ask, model

from kvtransport.errors import ConfigError, UnknownOptionError
from kvtransport.policy import options
from kvtransport.policy.recompute import (
    AlwaysPull,
    NeverPull,
    RecomputePolicy,
    Threshold,
    load_recompute,
)

# -- simple policies


@pytest.mark.parametrize(("beyond", "pull"), [(0, False), (63, False), (64, True), (65, True)])
def test_threshold_at_its_edge(beyond: int, pull: bool) -> None:
    decision = Threshold().decide(ask(beyond))
    assert decision.pull is pull
    assert decision.reason == ("threshold_reached" if pull else "below_threshold")


def test_threshold_counts_beyond_the_local_hit() -> None:
    assert not Threshold().decide(ask(63, local_tokens=100_000)).pull


def test_threshold_zero_still_pulls_nothing_for_nothing() -> None:
    assert not Threshold({"kv_recompute_threshold": 0}).decide(ask(0)).pull
    assert Threshold({"kv_recompute_threshold": 0}).decide(ask(1)).pull


def test_always_and_never() -> None:
    assert AlwaysPull().decide(ask(1)).pull
    assert not AlwaysPull().decide(ask(0)).pull
    assert not NeverPull().decide(ask(100_000)).pull


@pytest.mark.parametrize("name", ["always_pull", "never_pull", "threshold", "cost_model"])
def test_policies_by_name(name: str) -> None:
    policy = load_recompute(name)
    assert isinstance(policy, RecomputePolicy)
    policy.observe_transfer(peer="d", nbytes=1, descriptors=1, seconds=1.0)
    policy.observe_step(tokens=1, context_tokens=0, seconds=1.0)
    assert policy.describe()
    policy.close()


def test_bad_names_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cost_model'"):
        load_recompute("costmodel")
    with pytest.raises(UnknownOptionError, match="kv_recompute_threshold"):
        load_recompute("threshold", {"kv_recompute_treshold": 1})
    with pytest.raises(UnknownOptionError):
        load_recompute("always_pull", {"kv_recompute_threshold": 1})
    for config in (
        {"kv_recompute_threshold": -1},
        {"margin": 0},
        {"margin": math.nan},
        {"min_steps": 0},
        {"explore_after_s": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(config))):
            load_recompute("cost_model", config)


def test_third_party_policy_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("coin", "support.third_party:Coin", "kvtransport.recompute"),
        EntryPoint("wrong", "builtins:dict", "kvtransport.recompute"),
    ]
    monkeypatch.setattr(options, "entry_points", lambda group: points)
    policy = load_recompute("coin", {"side": 1})
    assert policy.config == {"side": 1}
    assert policy.decide(ask(2)).pull
    with pytest.raises(ConfigError, match="builtins:dict made a dict"):
        load_recompute("wrong")
    with pytest.raises(ConfigError, match="did you mean 'coin'"):
        load_recompute("coyn")


# -- decisions of the cost model


def test_many_prompts_ahead_are_not_one_long_one() -> None:
    """Tokens attend within their own prompt only."""
    cost = model(compute_step_s=0.0)
    many = cost.decide(ask(1000, load_tokens=200_000, load_pairs=200 * 1000 * 500.0))
    one = cost.decide(ask(1000, load_tokens=200_000, load_pairs=200_000 * 100_000.0))
    assert many.predicted_wait_s == pytest.approx(200_000 * 5e-5 + 1e8 * 1e-9)
    assert one.predicted_wait_s == pytest.approx(200_000 * 5e-5 + 2e10 * 1e-9)


def test_rates_that_are_not_used_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model()
    assert not caplog.records
    model(pull_bytes_per_s=0.0, compute_token_s=-1.0)
    assert "compute_token_s=-1.0" in caplog.text
    assert "pull_fixed_s=0.02" in caplog.text


def test_idle_engine_computes_what_a_busy_one_pulls() -> None:
    cost = model(pull_fixed_s=0.25, compute_pair_s=0.0)
    idle = cost.decide(ask(6000))
    busy = cost.decide(ask(6000, load_tokens=40_000))
    assert (idle.pull, idle.reason) == (False, "compute_sooner")
    assert (busy.pull, busy.reason) == (True, "pull_sooner")
    assert busy.predicted_wait_s > idle.predicted_pull_s


def test_network_slower_than_compute_never_pulls() -> None:
    cost = model(pull_bytes_per_s=1e9)
    for tokens in (1, 64, 2048, 100_000):
        assert not cost.decide(ask(tokens)).pull, tokens


def test_prediction_is_the_formula() -> None:
    decision = model().decide(ask(1600, local_tokens=400, queued_nbytes=10**9))
    assert decision.predicted_pull_s == pytest.approx(
        0.02 + 100 * 2e-6 + (1600 * TOKEN_NBYTES + 10**9) / 1e10
    )
    assert decision.predicted_compute_s == pytest.approx(
        0.005 + 1600 * 5e-5 + 1600 * (400 + 800) * 1e-9
    )


def test_more_descriptors_cost_more() -> None:
    cost = model(pull_descriptor_s=1e-4)
    assert cost.decide(ask(4000, descriptors=80)).pull
    assert not cost.decide(ask(4000, descriptors=4000)).pull


def test_queue_at_the_peer_counts() -> None:
    assert model().decide(ask(4000)).pull
    assert not model().decide(ask(4000, queued_nbytes=10**10)).pull


def test_margin() -> None:
    assert model().decide(ask(4000)).pull
    assert not model(margin=0.1).decide(ask(4000)).pull


def test_a_decode_engine_computes_only_what_is_far_cheaper() -> None:
    cost = model()
    assert not cost.decide(ask(200)).pull
    assert cost.decide(ask(200, direction="prefill_to_decode")).pull
    strict = model(handoff_margin=1.0)
    assert not strict.decide(ask(200, direction="prefill_to_decode")).pull


@pytest.mark.parametrize("name", ["threshold", "cost_model"])
def test_thresholds_differ_by_direction(name: str) -> None:
    policy = load_recompute(name, {"handoff_threshold": 8})
    for direction, least in (("decode_to_prefill", 64), ("prefill_to_decode", 8)):
        assert not policy.decide(ask(least - 1, direction=direction)).pull
        assert policy.decide(ask(least, direction=direction)).pull


@pytest.mark.parametrize(
    "broken",
    [
        {"pull_bytes_per_s": 0.0},
        {"pull_bytes_per_s": math.nan},
        {"pull_bytes_per_s": math.inf, "pull_descriptor_s": 0.0},
        {"pull_bytes_per_s": -1.0},
        {"pull_bytes_per_s": 1.0},
        {"pull_fixed_s": math.nan},
        {"pull_fixed_s": 1e9},
        {"compute_token_s": math.nan},
        {"compute_token_s": -1.0},
        {"compute_token_s": 1e6},
        {"compute_token_s": 0.0, "compute_pair_s": 0.0, "compute_step_s": 0.0},
        {"compute_step_s": math.inf},
    ],
)
@pytest.mark.parametrize(("beyond", "pull"), [(63, False), (64, True), (65, True)])
def test_without_usable_rates_the_threshold_decides(
    broken: dict[str, float], beyond: int, pull: bool
) -> None:
    decision = model(**broken).decide(ask(beyond))
    assert decision.pull is pull
    assert decision.reason.startswith("uncalibrated_")
    assert math.isnan(decision.predicted_pull_s)


def test_unknown_size_is_left_to_the_threshold() -> None:
    assert model().decide(ask(64, nbytes=0)).reason == "uncalibrated_threshold_reached"


@given(
    st.integers(1, 200_000),
    st.integers(0, 200_000),
    st.integers(0, 10**6),
    st.sampled_from([0, 10**6, 10**9]),
)
def test_more_load_never_speaks_against_pulling(
    tokens: int, local: int, load: int, queued: int
) -> None:
    cost = model()
    less = cost.decide(ask(tokens, local_tokens=local, load_tokens=load // 2, queued_nbytes=queued))
    more = cost.decide(ask(tokens, local_tokens=local, load_tokens=load, queued_nbytes=queued))
    assert more.pull or not less.pull
