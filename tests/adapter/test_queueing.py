"""Requests that wait long, are preempted, or end with their pull; caches that are reset."""

from __future__ import annotations

import time

import pytest
from support.sim import BLOCK, Sim, SimPair, reference
from support.turns import retained, tokens

from kvtransport import errors
from kvtransport_vllm import lookups, outcomes

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def leases(owner: Sim) -> int:
    return int(owner.side._engine.ledger.gauges().leases)


def run_until_leases(reader: Sim, owner: Sim, count: int) -> None:
    """The reader runs until the owner has granted so many leases, or only so many are left."""
    end = time.monotonic() + 10
    while leases(owner) != count:
        assert time.monotonic() < end, f"{leases(owner)} leases of {owner.name}"
        reader.step()
        time.sleep(0.005)


def run_for(reader: Sim, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        reader.step()
        time.sleep(0.005)


def gave_back(pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch) -> tuple[SimPair, list[int]]:
    """P is busy; its request ``queued`` had a lease and has given it back.  The prompt of it."""
    monkeypatch.setattr(lookups, "UNASKED_S", 0.2)
    pair, prompt = retained(pairs, max_seqs=1, max_model_len=8192, blocks=600)
    pair.p.add("busy", tokens(20, seed=5), max_tokens=8000)
    pair.p.step()
    pair.p.add("queued", prompt, params=PREFILL)
    run_until_leases(pair.p, pair.d, 1)
    run_until_leases(pair.p, pair.d, 0)
    return pair, prompt


def test_a_long_queue_does_not_pin_what_the_peer_retains(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's own requests can have it, and then there is nothing to pull."""
    pair, prompt = gave_back(pairs, monkeypatch)
    assert pair.d.side._engine.held.make_room(pair.d.cache.num_blocks - 1), "D can have it all"
    pair.p.abort("busy")
    assert pair.p.finish("queued") == reference(prompt, 1)
    assert pair.p.params["queued"]["kvt_turn"]["outcome"] == outcomes.NO_HOLDING


def test_what_was_given_back_is_found_again(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompt = gave_back(pairs, monkeypatch)
    pair.p.abort("busy")
    assert pair.p.finish("queued") == reference(prompt, 1)
    turn = pair.p.params["queued"]["kvt_turn"]
    assert (turn["outcome"], turn["pulled_tokens"]) == (outcomes.PULLED, 339)
    assert pair.p.counted("kvtransport_attempts_total", direction="decode_to_prefill") == 2
    assert pair.p.counted("kvtransport_outcomes_total", direction="decode_to_prefill") == 2


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_found_again_is_kept(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch, *, alone: bool
) -> None:
    """A scheduler that comes by seldom would find others ready, time and again."""
    pair, prompt = gave_back(pairs, monkeypatch)
    pair.p.side._engine.alone = alone
    pair.p.step()  # the next step begins with the patience that this one leaves
    turn = pair.p.side._turns["queued"]
    pair.p.side.get_num_new_matched_tokens(turn.request, 0)
    run_until_leases(pair.p, pair.d, 1)
    run_for(pair.p, 0.6)
    assert leases(pair.d) == 1
    pair.p.abort("busy")
    assert pair.p.finish("queued") == reference(prompt, 1)
    assert pair.p.params["queued"]["kvt_turn"]["outcome"] == outcomes.PULLED


def test_a_handoff_is_kept_however_long_its_reader_queues(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "UNASKED_S", 0.1)
    pair = SimPair(d={"max_seqs": 1, "max_model_len": 8192, "blocks": 600})
    pairs.append(pair)
    prompt = tokens(200)
    pair.p.add("first leg", prompt, params=PREFILL)
    pair.p.finish("first leg")
    pair.d.add("busy", tokens(20, seed=5), max_tokens=8000)
    pair.d.step()
    pair.d.add("second leg", prompt, params=pair.p.params["first leg"])
    run_until_leases(pair.d, pair.p, 1)
    run_for(pair.d, 0.4)
    assert leases(pair.p) == 1
    pair.d.abort("busy")
    assert pair.d.finish("second leg") == reference(prompt, 1)
    assert pair.d.counted("kvtransport_outcomes_total", outcome=outcomes.PULLED) == 1


def test_tokens_are_counted_as_they_were_at_first(pairs: list[SimPair]) -> None:
    """What a preempted request finds in its own cache was computed here, not hit."""
    pair = SimPair(d={"blocks": 40, "retention": "off"})
    pairs.append(pair)
    names = [f"turn {at}" for at in range(3)]
    for at, name in enumerate(names):
        prompt = tokens(9 * BLOCK, seed=at)
        pair.p.add(name, prompt, params=PREFILL)
        pair.p.finish(name)
        wanted = {**pair.p.params[name], "kvt_reuse": False}
        pair.d.add(name, prompt, max_tokens=8 * BLOCK, params=wanted)
    pair.d.run(timeout_s=60)
    assert pair.d.preemptions > 0
    counted = {
        source: pair.d.counted("kvtransport_tokens_total", source=source)
        for source in ("local", "pulled", "recomputed")
    }
    assert counted == {"local": 0, "pulled": 0, "recomputed": 3 * 9 * BLOCK}


def test_a_request_that_fails_with_its_pull_says_why(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs, failure_policy="fail")
    agent = pair.p.worker.agent  # type: ignore[union-attr]

    def read(*_args: object, **_more: object) -> None:
        raise errors.PeerLostError("injected")

    agent.read = read  # type: ignore[method-assign,assignment]
    pair.p.add("turn", prompt, params=PREFILL)
    pair.p.run()
    assert pair.p.finished["turn"] == "error"
    assert pair.p.counted("kvtransport_outcomes_total", outcome=outcomes.PEER_LOST) == 1
    assert pair.p.counted("kvtransport_outcomes_total", outcome=outcomes.ABORTED) == 0


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_gives_up_what_is_held(pairs: list[SimPair], *, running: bool) -> None:
    """Weights may have changed: nothing that was computed before may be found."""
    pair, prompt = retained(pairs)
    assert pair.d.side._engine.ledger.gauges().holdings > 0
    if running:
        pair.d.add("running", tokens(50, seed=9), max_tokens=30)
        pair.d.step()
    assert pair.d.scheduler.reset_prefix_cache(reset_running_requests=running)
    assert pair.d.side._engine.ledger.gauges().holdings == 0
    pair.d.run()
    _, turn = pair.turn(prompt)
    assert turn["pulled_tokens"] == 0


def test_a_reset_gives_back_what_was_found(pairs: list[SimPair]) -> None:
    """It was computed before; the peer's own reset need not wait for it either."""
    pair, prompt = retained(pairs)
    pair.p.add("turn", prompt, params=PREFILL)
    wait_for_lookup(pair)
    assert leases(pair.d) == 1
    assert pair.p.scheduler.reset_prefix_cache()
    end = time.monotonic() + 10
    while leases(pair.d):
        assert time.monotonic() < end
        time.sleep(0.005)
    assert pair.d.scheduler.reset_prefix_cache()
    assert pair.p.finish("turn") == reference(prompt, 1)
    assert pair.p.params["turn"]["kvt_turn"]["outcome"] == outcomes.NO_HOLDING


def wait_for_lookup(pair: SimPair) -> None:
    lookup = pair.p.side._turns["turn"].lookup
    assert lookup is not None
    assert lookup.wait(10) is not None
