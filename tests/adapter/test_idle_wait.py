"""An engine that only waits for pulls lets a worker wait; nobody else ever has to."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.sim import Sim, SimPair
from support.turns import Silent, retained, tokens
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from kvtransport.layers.fault import FaultPlan
from kvtransport_vllm import worker
from kvtransport_vllm.meta import StepMetadata

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def begin(pair: SimPair, prompt: list[int]) -> None:
    """The next turn reaches P, and its lookup is answered."""
    pair.p.add("turn", prompt, params=PREFILL)
    turn = pair.p.side._turns["turn"]
    end = time.monotonic() + 10
    while turn.lookup.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.001)


def step(sim: Sim) -> StepMetadata:
    meta = sim.step().kv_connector_metadata
    assert isinstance(meta, StepMetadata)
    return meta


def test_a_step_with_nothing_but_a_pull_is_idle(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    begin(pair, prompt)
    meta = step(pair.p)
    assert meta.pulls
    assert meta.idle
    pair.p.finish("turn")


def plan(sim: Sim) -> StepMetadata:
    """A step that nothing is scheduled in and whose output is not processed yet."""
    meta = sim.side.build_connector_meta(SchedulerOutput.make_empty())
    assert isinstance(meta, StepMetadata)
    return meta


@pytest.fixture
def loading(pairs: list[SimPair]) -> Iterator[Sim]:
    """A prefill engine that pulls and does nothing else."""
    pair, prompt = retained(pairs)
    begin(pair, prompt)
    pair.p.hold_results = True
    pair.p.step()
    yield pair.p
    pair.p.hold_results = False
    pair.p.finish("turn")


def test_a_step_that_computes_is_not_idle(loading: Sim) -> None:
    loading.add("other", tokens(64, seed=9), max_tokens=50)
    assert not step(loading).idle
    loading.abort("other")
    assert step(loading).idle


@pytest.mark.parametrize(
    "status",
    [status for status in RequestStatus if not RequestStatus.is_finished(status)],
    ids=lambda status: status.name.lower(),
)
def test_a_step_is_idle_only_if_all_requests_are_being_pulled(
    loading: Sim, status: RequestStatus
) -> None:
    """Whatever another one waits for, the next step may have it."""
    other = loading.add("other", tokens(64, seed=9), max_tokens=50)
    other.status = status
    assert plan(loading).idle == (status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    loading.side.step_ended()
    other.status = RequestStatus.WAITING
    loading.abort("other")


def test_a_request_that_is_looked_up_keeps_a_step_from_being_idle(loading: Sim) -> None:
    loading.add("other", tokens(64, seed=9), params=PREFILL)
    loading.side._turns["other"].lookup = Silent()
    assert not step(loading).idle
    loading.abort("other")


def test_data_parallel_ranks_do_not_keep_each_other_waiting(loading: Sim) -> None:
    loading.side._engine.alone = False
    assert not plan(loading).idle
    loading.side.step_ended()
    loading.side._engine.alone = True
    assert plan(loading).idle
    loading.side.step_ended()


def test_no_step_waits_while_another_one_may_have_news(loading: Sim) -> None:
    """With asynchronous scheduling a pull's end would wait for the wait behind it."""
    assert plan(loading).idle
    assert not plan(loading).idle
    loading.side.step_ended()
    assert not plan(loading).idle
    for _ in range(2):
        loading.side.step_ended()
    assert plan(loading).idle
    loading.side.step_ended()


@pytest.mark.parametrize("idle", [True, False])
def test_an_idle_step_reports_the_pull_that_it_began(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", 10.0)
    pair, prompt = retained(pairs, faults=FaultPlan(delay_polls=30))
    pair.p.side._engine.alone = idle
    begin(pair, prompt)
    assert step(pair.p).pulls
    assert (pair.p.side._turns["turn"].phase.value == "settled") == idle
    pair.p.finish("turn")


def test_the_wait_for_a_pull_that_does_not_end_is_short(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", 0.05)
    faults = FaultPlan(drop_rate=1.0)
    pair, prompt = retained(pairs, faults=faults, transfer_timeout_s=3.0, drain_timeout_s=0.2)
    begin(pair, prompt)
    assert step(pair.p).idle
    # A wait for the pull's own end would have outlasted its timeout and settled it.
    assert pair.p.side._turns["turn"].phase.value == "loading"
    pair.p.abort("turn")
    pair.p.run(timeout_s=20)
