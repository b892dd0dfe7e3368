"""An engine that only waits for pulls lets a worker wait; nobody else ever has to."""

from __future__ import annotations

import time

import pytest
from support.sim import Sim, SimPair
from support.turns import Silent, retained, tokens
from vllm.v1.core.sched.output import SchedulerOutput

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


@pytest.mark.parametrize("other", ["computing", "looking", "data parallel"])
def test_a_step_is_not_idle_when_somebody_would_wait(pairs: list[SimPair], other: str) -> None:
    pair, prompt = retained(pairs)
    if other == "data parallel":
        pair.p.side._engine.alone = False
    begin(pair, prompt)
    pair.p.hold_results = True
    if other == "computing":
        pair.p.add("other", tokens(64, seed=9), max_tokens=50)
    if other == "looking":
        pair.p.add("other", prompt, params=PREFILL)
        pair.p.side._turns["other"].lookup = Silent()
    assert not step(pair.p).idle
    pair.p.hold_results = False
    pair.p.abort("other")
    pair.p.finish("turn")


def test_a_running_request_that_this_step_leaves_out_is_not_delayed(pairs: list[SimPair]) -> None:
    """With asynchronous scheduling its last step may not have been processed yet."""
    pair, prompt = retained(pairs)
    begin(pair, prompt)
    pair.p.hold_results = True
    pair.p.add("other", tokens(64, seed=9), max_tokens=50)
    pair.p.step()
    assert not pair.p.side.build_connector_meta(SchedulerOutput.make_empty()).idle
    pair.p.abort("other")
    assert pair.p.side.build_connector_meta(SchedulerOutput.make_empty()).idle
    pair.p.hold_results = False
    pair.p.finish("turn")


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
    began = time.monotonic()
    assert step(pair.p).idle
    assert 0.05 <= time.monotonic() - began < 2.0
    assert pair.p.side._turns["turn"].phase.value == "loading"
    pair.p.abort("turn")
    pair.p.run(timeout_s=20)
