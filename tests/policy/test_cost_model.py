"""The cost model learns, forgets and remembers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cost import RATES, TOKEN_NBYTES, Clock, ask

from kvtransport.policy import calibration
from kvtransport.policy.cost_model import MAX_PEERS, CostModel
from kvtransport.policy.fit import _non_negative, fit
from kvtransport.policy.rates import ComputeRates, PullRates, break_even_tokens
from kvtransport.policy.samples import Sample, Samples

# -- learning


def teach_steps(
    cost: CostModel, rates: ComputeRates, *, noise: float = 0.05, count: int = 60
) -> None:
    random = np.random.default_rng(1)
    for _ in range(count):
        tokens = int(random.integers(16, 4096))
        context = int(random.integers(0, 8192))
        seconds = rates.seconds(tokens, context) * random.normal(1.0, noise)
        cost.observe_step(tokens=tokens, context_tokens=context, seconds=seconds)
        cost._clock.now += 0.1


def teach_pulls(
    cost: CostModel, rates: PullRates, *, peer: str = "d/1", count: int = 60, noise: float = 0.05
) -> None:
    random = np.random.default_rng(2)
    for _ in range(count):
        tokens = int(random.integers(64, 8192))
        descriptors = int(random.integers(1, 500))
        nbytes = tokens * TOKEN_NBYTES
        seconds = rates.seconds(nbytes=nbytes, descriptors=descriptors)
        cost.observe_transfer(
            peer=peer,
            nbytes=nbytes,
            descriptors=descriptors,
            seconds=seconds * random.normal(1.0, noise),
        )
        cost._clock.now += 0.1


STEP = ComputeRates(step_s=0.004, token_s=4e-5, pair_s=2e-9, chunk_tokens=4096)
PULL = PullRates(fixed_s=0.01, descriptor_s=1e-5, byte_s=2e-10)


def test_learns_its_own_rates() -> None:
    cost = CostModel(clock=Clock())
    teach_steps(cost, STEP)
    teach_pulls(cost, PULL)
    cost._clock.now += 10.0
    for tokens in (200, 1000, 4000):
        decision = cost.decide(ask(tokens, descriptors=tokens // 20))
        true_pull = PULL.seconds(nbytes=tokens * TOKEN_NBYTES, descriptors=tokens // 20)
        assert decision.predicted_pull_s == pytest.approx(true_pull, rel=0.1)
        assert decision.predicted_compute_s == pytest.approx(STEP.seconds(tokens), rel=0.1)
    teach_pulls(cost, PULL, count=10)
    shown = cost.describe()
    assert shown["pull"]["typical_error"] < 0.2
    true = break_even_tokens(PULL, STEP, token_nbytes=TOKEN_NBYTES, descriptors_per_token=1 / 20)
    assert shown["break_even_tokens"] == pytest.approx(true, rel=0.3)


@pytest.mark.parametrize("factor", [100.0, 0.02])
def test_outliers_do_not_move_the_estimate(factor: float) -> None:
    """Neither stalls nor times that are too good to be true."""
    clean, dirty = CostModel(clock=Clock()), CostModel(clock=Clock())
    for cost in (clean, dirty):
        teach_steps(cost, STEP)
        teach_pulls(cost, PULL)
    for at in range(8):
        nbytes, tokens = (at + 1) * 10**8, (at + 1) * 400
        pull_s = PULL.seconds(nbytes=nbytes, descriptors=10)
        dirty.observe_transfer(peer="d/1", nbytes=nbytes, descriptors=10, seconds=factor * pull_s)
        dirty.observe_step(tokens=tokens, context_tokens=0, seconds=factor * STEP.seconds(tokens))
    for cost in (clean, dirty):
        cost._clock.now += 10.0
    a, b = clean.decide(ask(2000)), dirty.decide(ask(2000))
    assert b.predicted_pull_s == pytest.approx(a.predicted_pull_s, rel=0.15)
    assert b.predicted_compute_s == pytest.approx(a.predicted_compute_s, rel=0.15)


def test_first_contact_is_kept_apart() -> None:
    cost = CostModel(clock=Clock())
    teach_steps(cost, STEP)
    teach_pulls(cost, PULL)
    cost._clock.now += 10.0
    before = cost.decide(ask(2000)).predicted_pull_s
    for _ in range(50):
        cost.observe_transfer(
            peer="d/2", nbytes=10**8, descriptors=10, seconds=2.0, first_contact=True
        )
        cost._clock.now += 10.0
    assert cost.decide(ask(2000)).predicted_pull_s == before
    shown = cost.describe()["pull"]
    assert shown["first_contacts"] == 50
    assert shown["last_first_contact_s"] == 2.0


def test_peers_are_priced_apart_and_incarnations_together() -> None:
    cost = CostModel({"explore_after_s": 0}, clock=Clock())
    teach_steps(cost, STEP)
    teach_pulls(cost, PULL, peer="near/1")
    teach_pulls(cost, PullRates(fixed_s=0.5, byte_s=1e-8), peer="far/1")
    cost._clock.now += 10.0
    assert cost.decide(ask(4000, peer="near/2")).pull
    assert not cost.decide(ask(4000, peer="far/2")).pull


def test_unknown_peer_gets_the_price_of_all() -> None:
    cost = CostModel({"explore_after_s": 0}, clock=Clock())
    teach_steps(cost, STEP)
    teach_pulls(cost, PULL, peer="near/1")
    cost._clock.now += 10.0
    decision = cost.decide(ask(4000, peer="new/1"))
    assert decision.reason == "pull_sooner"


def test_a_slow_phase_makes_computing_dearer_and_passes() -> None:
    cost = CostModel({**RATES, "pull_fixed_s": 0.2}, clock=Clock())
    teach_steps(cost, STEP, count=200)
    cost._clock.now += 2.0
    usual = cost.decide(ask(2000)).predicted_compute_s
    for _ in range(40):
        cost.observe_step(tokens=500, context_tokens=0, seconds=3 * STEP.seconds(500))
    busy = cost.decide(ask(2000)).predicted_compute_s
    assert busy > 2 * usual
    cost._clock.now += 60.0
    assert cost.decide(ask(2000)).predicted_compute_s < 1.5 * usual


@pytest.mark.parametrize(
    "sample",
    [
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": 1e9},
        {"nbytes": 0},
        {"nbytes": -5},
    ],
)
def test_absurd_transfers_are_not_learned_from(sample: dict[str, float]) -> None:
    cost = CostModel(clock=Clock())
    cost.observe_transfer(**{"peer": "d", "nbytes": 10, "descriptors": 1, "seconds": 1.0, **sample})
    assert cost.rejected == 1
    assert cost._all.samples.total == 0


@pytest.mark.parametrize(
    "sample", [{"seconds": math.nan}, {"seconds": 0.0}, {"tokens": 0}, {"tokens": -1}]
)
def test_absurd_steps_are_not_learned_from(sample: dict[str, float]) -> None:
    cost = CostModel(clock=Clock())
    cost.observe_step(**{"tokens": 5, "context_tokens": 0, "seconds": 1.0, **sample})
    assert cost.rejected == 1
    assert cost._steps.total == 0


def test_a_wrong_estimate_is_tried_again() -> None:
    """A peer that looked too slow is asked once in a while, and only if that is cheap."""
    cost = CostModel({"explore_after_s": 60.0}, clock=Clock())
    teach_steps(cost, STEP)
    teach_pulls(cost, PullRates(fixed_s=0.15, byte_s=2e-10), count=40)
    cost._clock.now += 10.0
    assert cost.decide(ask(1500)).reason == "compute_sooner"
    cost._clock.now += 60.0
    assert cost.decide(ask(1500)).reason == "explore"
    assert cost.decide(ask(1500)).reason == "explore", "asked again while waiting for memory"
    cost.pull_started(peer="d/1")
    assert cost.decide(ask(1500)).reason == "compute_sooner", "one pull is enough"
    cost._clock.now += 60.0
    assert cost.decide(ask(20)).reason == "compute_sooner", "far too expensive to try"
    assert cost.decide(ask(1500)).reason == "explore", "and no chance was spent on it"


TWICE = {**RATES, "pull_fixed_s": 0.0, "pull_descriptor_s": 0.0, "compute_pair_s": 0.0}
"""Pulling takes exactly twice as long as computing, less what a step costs."""
TWICE["pull_bytes_per_s"] = TOKEN_NBYTES / (2 * TWICE["compute_token_s"])
del TWICE["explore_after_s"]


def pulls_within(cost: CostModel, seconds: float, peers: tuple[str, ...] = ("d/1",)) -> int:
    """How often the policy pulls in that time; every pull starts at once."""
    pulls, end = 0, cost._clock.now + seconds
    while cost._clock.now < end:
        for peer in peers:
            if cost.decide(ask(4000, peer=peer)).pull:
                pulls += 1
                cost.pull_started(peer=peer)
        cost._clock.now += 0.5
    return pulls


def test_given_rates_are_not_explored_before_their_time() -> None:
    cost = CostModel(TWICE, clock=Clock())
    after_s = cost.options.explore_after_s
    assert after_s == 600, "the default"
    assert pulls_within(cost, after_s, ("d/1", "e/1")) == 0
    assert pulls_within(cost, after_s, ("d/1", "e/1")) == 2


def slow_link(config: dict[str, object] | None = None) -> CostModel:
    """A model that has learned from one peer that pulling takes twice as long."""
    cost = CostModel(config, clock=Clock())
    teach_steps(cost, ComputeRates(token_s=TWICE["compute_token_s"], step_s=1e-6))
    teach_pulls(cost, PullRates(byte_s=1 / TWICE["pull_bytes_per_s"]), noise=0.0)
    cost._clock.now += 10.0
    return cost


def test_an_unknown_peer_is_explored_exactly_once() -> None:
    cost = slow_link()
    assert pulls_within(cost, 500.0) == 0, "its rates were just measured"
    assert pulls_within(cost, 500.0, ("new/1",)) == 1


def test_restored_rates_are_not_explored_before_their_time(tmp_path: Path) -> None:
    config = {"state_file": str(tmp_path / "calibration.json")}
    slow_link(config).close()
    cost = CostModel(config, clock=Clock())
    cost._clock.now += 10.0
    assert pulls_within(cost, 500.0) == 0
    assert pulls_within(cost, 500.0) == 1


def test_step_times_are_compared_with_their_prediction() -> None:
    step = {"tokens": 1000, "context_tokens": 500}
    assert CostModel(clock=Clock()).observe_step(**step, seconds=0.1) is None
    given = CostModel(RATES, clock=Clock())
    expected = 0.005 + 1000 * 5e-5 + 1000 * (500 + 500) * 1e-9
    assert given.observe_step(**step, seconds=0.1) == pytest.approx(expected / 0.1)
    assert given.observe_step(**step, seconds=math.nan) is None
    learned = CostModel(clock=Clock())
    teach_steps(learned, STEP)
    learned.compute_seconds(1)
    ratio = learned.observe_step(**step, seconds=STEP.seconds(1000, 500))
    assert ratio == pytest.approx(1.0, abs=0.2)


def test_peers_are_bounded() -> None:
    cost = CostModel(clock=Clock())
    for at in range(2 * MAX_PEERS):
        cost.observe_transfer(peer=f"d{at}/1", nbytes=10, descriptors=1, seconds=1.0)
    assert len(cost._peers) == MAX_PEERS


def test_samples_are_bounded_and_keep_all_sizes() -> None:
    samples = Samples()
    samples.add(Sample(100_000.0, 0.0, 5.0))
    for at in range(3000):
        samples.add(Sample(10.0 + at % 3, 0.0, 1.0))
    assert Sample(100_000.0, 0.0, 5.0) in samples.kept()
    assert len(samples) < 200
    for at in range(3000):
        samples.add(Sample(10.0 + at % 3, 0.0, 1.0))
    assert Sample(100_000.0, 0.0, 5.0) not in samples.kept(), "too old to be true"


# -- fits


@given(
    st.tuples(st.floats(0, 0.1), st.floats(0, 1e-4), st.floats(1e-12, 1e-8)),
    st.integers(1, 1000),
)
def test_fit_predicts_exact_measurements(rates: tuple[float, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    table = np.column_stack(
        (np.ones(40), random.uniform(1, 1000, 40), random.uniform(1e6, 1e10, 40))
    )
    seconds = table @ np.array(rates)
    fitted = fit(table, seconds)
    assert (fitted >= 0).all()
    assert table @ fitted == pytest.approx(seconds, rel=0.02)


@given(st.integers(1, 6), st.integers(1, 1000))
def test_fit_of_few_or_equal_samples_is_finite(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    table = np.ones((count, 3)) * random.uniform(1, 1e6)
    seconds = random.uniform(0.1, 1.0, count)
    fitted = fit(table, seconds)
    assert np.isfinite(fitted).all()
    assert (fitted >= 0).all()


@given(st.integers(1, 10_000))
def test_no_rates_without_negative_ones_fit_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    table = random.uniform(0.1, 1.0, (12, 3))
    target = table @ random.uniform(-1.0, 1.0, 3)
    weights = random.uniform(0.1, 1.0, 12)

    def loss(rates: np.ndarray) -> float:
        return float((weights * (table @ rates - target) ** 2).sum())

    best = _non_negative(table, target, weights)
    assert (best >= 0).all()
    for _ in range(30):
        other = np.maximum(0.0, best + random.normal(0, 0.1, 3))
        assert loss(best) <= loss(other) + 1e-6


def test_fit_of_nothing() -> None:
    assert fit(np.empty((0, 3)), np.empty(0)).tolist() == [0.0, 0.0, 0.0]


def test_break_even() -> None:
    tokens = break_even_tokens(PULL, STEP, token_nbytes=TOKEN_NBYTES, descriptors_per_token=0.05)
    assert tokens is not None

    def pays(count: int) -> bool:
        pulled = PULL.seconds(nbytes=count * TOKEN_NBYTES, descriptors=max(1.0, 0.05 * count))
        return pulled + STEP.step_s <= STEP.seconds(count)

    assert pays(tokens)
    assert not pays(tokens - 1)
    slow = PullRates(fixed_s=0.0, byte_s=1e-3)
    assert break_even_tokens(slow, STEP, token_nbytes=1e6, descriptors_per_token=0) is None


# -- calibration file


def taught(file: Path, **config: object) -> CostModel:
    cost = CostModel({"state_file": str(file), "explore_after_s": 0, **config}, clock=Clock())
    teach_steps(cost, STEP)
    teach_pulls(cost, PULL)
    return cost


def test_restart_starts_warm(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    first = taught(file)
    first._clock.now += 10.0
    before = first.decide(ask(2000))
    first.close()
    second = CostModel({"state_file": str(file), "explore_after_s": 0}, clock=Clock())
    after = second.decide(ask(2000))
    assert after.reason == before.reason
    assert after.predicted_pull_s == pytest.approx(before.predicted_pull_s, rel=0.05)
    assert after.predicted_compute_s == pytest.approx(before.predicted_compute_s, rel=0.05)
    assert list(tmp_path.iterdir()) == [file], "no draft is left over"


def test_another_engine_does_not_start_with_it(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    taught(file, state_identity="model a").close()
    other = CostModel({"state_file": str(file), "state_identity": "model b"}, clock=Clock())
    assert other.decide(ask(2000)).reason.startswith("uncalibrated")
    other.close()
    same = CostModel({"state_file": str(file), "state_identity": "model a"}, clock=Clock())
    assert not same.decide(ask(2000)).reason.startswith("uncalibrated")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b'{"version": 99, "identity": "", "chunk_tokens": 1, "steps": [], "transfers": {}}',
        b'{"version": 1, "identity": "", "chunk_tokens": "x", "steps": [], "transfers": {}}',
        b"x" * (calibration.MAX_NBYTES + 1),
        b"[" * 200_000,
    ],
)
def test_damaged_file_starts_cold(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "calibration.json"
    file.write_bytes(content)
    cost = CostModel({"state_file": str(file)}, clock=Clock())
    assert cost.decide(ask(64)).reason == "uncalibrated_threshold_reached"


@pytest.mark.parametrize("name", ["x" * 300, "not a folder/calibration.json"])
def test_a_path_that_can_not_be_starts_cold(tmp_path: Path, name: str) -> None:
    (tmp_path / "not a folder").touch()
    cost = CostModel({"state_file": str(tmp_path / name)}, clock=Clock())
    assert cost.decide(ask(64)).reason == "uncalibrated_threshold_reached"


def test_absurd_rows_in_the_file_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_bytes(
        b'{"version": 1, "identity": "", "chunk_tokens": -5, '
        b'"steps": [[1, 2], [0, 0, 0], [5, 5, -1], [1e999, 1, 1], [16, 100, 0.5]], '
        b'"transfers": {"d": [[1, 1, 1e9], [1e300, 1e300, 1], []]}}'
    )
    cost = CostModel({"state_file": str(file)}, clock=Clock())
    assert len(cost._steps) <= 1
    assert len(cost._all.samples) == 0


def test_unwritable_file_costs_nothing_but_the_file(tmp_path: Path) -> None:
    taught(tmp_path / "missing folder" / "calibration.json").close()


def test_saves_while_running(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    cost = taught(file)
    cost._clock.now += 100.0
    cost.observe_step(tokens=100, context_tokens=0, seconds=0.01)
    cost._file.close()
    assert file.exists()
