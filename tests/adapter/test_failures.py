"""Whatever goes wrong with a pull, the turn ends with the right tokens, and soon."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from support.sim import BLOCK, Sim, SimPair, reference
from support.turns import retained, tokens

from kvtransport import errors
from kvtransport.layers.fault import FaultPlan
from kvtransport_vllm import outcomes


class FailingReads:
    """Stands between the worker side and its agent: reads fail as told."""

    def __init__(self, agent: Any, error: Exception) -> None:
        self._agent = agent
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def read(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("local", ["none", "some"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.TransferFailedError("injected"), outcomes.TRANSPORT),
        (errors.PeerLostError("injected"), outcomes.PEER_LOST),
        (errors.StaleDescriptorError("injected"), outcomes.STALE),
    ],
)
def test_failed_pull_is_recomputed(
    pairs: list[SimPair], local: str, prefix_caching: bool, error: Exception, outcome: str
) -> None:
    pair, prompt = retained(pairs, prefix_caching=prefix_caching)
    if local == "some":
        pair.p.add("seed", prompt[:64], max_tokens=1)
        pair.p.finish("seed")
    pair.p.worker._agent = FailingReads(pair.p.worker._agent, error)  # type: ignore[union-attr,assignment]
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["outcome"] == outcome
    assert turn["pulled_tokens"] == 0
    counted = pair.p.counted("kvtransport_outcomes_total", outcome=outcome)
    assert counted == 1
    assert not pair.p.scheduler.requests


def test_lease_that_ran_out_during_the_read_discards_the_data(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    start = pair.p.worker.start  # type: ignore[union-attr]

    def start_late(meta: Any) -> None:
        # As if the lease ended before the read did; the bytes arrive all the same.
        meta.renewed = {}
        meta.pulls = [_expired(job) for job in meta.pulls]
        start(meta)

    pair.p.worker.start = start_late  # type: ignore[method-assign,union-attr]
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["outcome"] == outcomes.LEASE_EXPIRED
    assert turn["pulled_tokens"] == 0


def _expired(job: Any) -> Any:
    import dataclasses

    return dataclasses.replace(job, deadline_s=time.monotonic() - 1)


def test_decode_engine_gone_before_the_lookup(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs, lookup_timeout_s=0.3)
    pair.d.close()
    pair.p.add("orphan", prompt, params={"do_remote_decode": True})
    began = time.monotonic()
    assert pair.p.finish("orphan") == reference(prompt, 1)
    assert time.monotonic() - began < 5
    assert pair.p.params["orphan"]["kvt_turn"]["pulled_tokens"] == 0


def test_restarted_decode_engine_refuses_old_grants(pairs: list[SimPair]) -> None:
    """Same address, new incarnation: nothing of the old life is read."""
    pair, prompt = retained(pairs)
    address = pair.d.address
    pair.d.close()
    pair.d = Sim("d", listen=address, peers=[pair.p.address])
    pair.wait_connected()
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["pulled_tokens"] == 0


@pytest.mark.parametrize("when", ["looking", "loading", "ended", "running"])
def test_abort_frees_everything_once(pairs: list[SimPair], when: str) -> None:
    pair, prompt = retained(pairs)
    before = pair.p.free_blocks
    pair.p.add("victim", prompt, max_tokens=5, params={"do_remote_decode": True})
    pair.p.hold_results = when == "loading"
    if when == "loading":
        pair.p.run(lambda: _phase(pair.p, "victim") == "loading")
    elif when == "ended":
        pair.p.run(lambda: _phase(pair.p, "victim") == "settled")
    elif when == "running":
        pair.p.run(lambda: bool(pair.p.answers["victim"]))
    pair.p.abort("victim")
    pair.p.step()
    # The blocks of a read that has not ended stay out of use.
    assert bool(pair.p.scheduler.requests) == (when == "loading")
    pair.p.hold_results = False
    pair.p.run()
    assert not pair.p.scheduler.requests
    pair.p.empty()
    assert pair.p.free_blocks == before
    answer, _ = pair.turn(prompt)
    assert answer == reference(prompt, 8)


def test_read_that_never_becomes_quiet_is_quarantined(pairs: list[SimPair]) -> None:
    """Its blocks go to nobody, the request is recomputed, and the engine goes on."""
    pair = SimPair(
        p={
            "faults": FaultPlan(drop_rate=1.0),
            "transfer_timeout_s": 0.2,
            "drain_timeout_s": 0.2,
        }
    )
    pairs.append(pair)
    prompt = tokens(300)
    answer, _ = pair.turn(prompt, max_tokens=40)
    pair.p.empty()
    before = pair.p.free_blocks
    prompt = prompt + answer
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["outcome"] == outcomes.TRANSFER_TIMEOUT
    lost = pair.p.side._held.quarantined_blocks
    assert lost == -(-(len(prompt) - 1) // BLOCK)
    with pytest.raises(AssertionError, match="still holds blocks"):
        pair.p.empty(timeout_s=0.3)
    assert pair.p.free_blocks == before - lost


def _phase(sim: Sim, request_id: str) -> str:
    turn = sim.side._turns.get(request_id)
    return "" if turn is None else turn.phase.value


FAULTS: list[dict[str, Any]] = [
    {},
    {"faults": FaultPlan(seed=1, fail_rate=0.4, delay_polls=4, reorder=True)},
    {"faults": FaultPlan(seed=2, refuse_rate=0.5, duplicate_rate=0.3)},
    {"faults": FaultPlan(seed=3, peer_down_after=10)},
]


@pytest.mark.parametrize("faults", FAULTS, ids=["none", "failing", "refusing", "peer down"])
@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_leak_nothing(
    pairs: list[SimPair], seed: int, faults: dict[str, Any]
) -> None:
    pair = SimPair(p={"blocks": 120, **faults}, d={"blocks": 120, **faults})
    pairs.append(pair)
    rng = random.Random(seed)
    live: dict[str, list[int]] = {}
    history = tokens(200, seed)
    for i in range(60):
        name = f"r{i}"
        prompt = history[: rng.randrange(1, 200)] + tokens(
            rng.randrange(1, 60), rng.randrange(10**6)
        )
        live[name] = prompt
        sim = rng.choice([pair.p, pair.d])
        role = {"do_remote_decode": True} if sim is pair.p else {"do_remote_prefill": True}
        sim.add(name, prompt, max_tokens=1 if sim is pair.p else rng.randrange(1, 30), params=role)
        for _ in range(rng.randrange(0, 6)):
            side = rng.choice([pair.p, pair.d])
            side.hold_results = rng.random() < 0.5
            side.step()
        if rng.random() < 0.5:
            victim = rng.choice(list(live))
            for side in (pair.p, pair.d):
                if victim in side.scheduler.requests:
                    side.abort(victim)
    for side in (pair.p, pair.d):
        side.hold_results = False
        side.run(timeout_s=30)
    for side in (pair.p, pair.d):
        side.empty()
        assert side.free_blocks == side.cache.num_blocks - 1
        for name, answer in side.answers.items():
            if side.finished.get(name) == "length":
                assert answer == reference(live[name], len(answer))
