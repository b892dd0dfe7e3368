"""What is counted, gauged and logged about turns, on two real schedulers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.sim import BLOCK, Sim, SimPair, reference
from support.turns import retained, tokens

from kvtransport.errors import ConfigError
from kvtransport.lease.held import Lookup
from kvtransport_vllm import outcomes
from kvtransport_vllm.turn_log import TurnLog

RATES = {"pull_bytes_per_s": 1e9, "compute_step_s": 0.001, "compute_token_s": 1e-4}


def under_way(sim: Sim) -> float:
    attempts = sim.counted("kvtransport_attempts_total")
    return attempts - sim.counted("kvtransport_outcomes_total")


def samples(sim: Sim, name: str) -> list[float]:
    """All observations of a histogram so far."""
    found = sim.stats.data["samples"].items()
    return [value for key, values in found if key.split("|")[0] == name for value in values]


def start_pull(pair: SimPair, prompt: list[int]) -> None:
    """P has posted a read of which it does not learn the end yet."""
    pair.p.add("leg", prompt, params={"do_remote_decode": True})
    pair.p.hold_results = True
    pair.p.run(lambda: bool(pair.p.side._turns["leg"].loading_since_s))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


# -- attempts and outcomes


def test_a_turn_counts_as_attempt_from_its_beginning(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    assert under_way(pair.p) == under_way(pair.d) == 0
    start_pull(pair, prompt)
    pair.p.step()
    assert under_way(pair.p) == 1
    pair.p.hold_results = False
    pair.p.finish("leg")
    pair.p.run()
    assert under_way(pair.p) == 0


@pytest.mark.parametrize("when", ["looking", "loading", "running"])
def test_an_aborted_turn_settles_once(pairs: list[SimPair], tmp_path: Path, when: str) -> None:
    pair, prompt = retained(pairs, turn_log=str(tmp_path / "turns"))
    before = pair.p.counted("kvtransport_tokens_total")
    if when == "loading":
        start_pull(pair, prompt)
    else:
        pair.p.add("leg", prompt, max_tokens=5, params={"do_remote_decode": True})
    if when == "running":
        pair.p.run(lambda: bool(pair.p.answers["leg"]))
    pair.p.abort("leg")
    pair.p.step()
    pair.p.hold_results = False
    pair.p.run()
    pair.p.step()
    assert under_way(pair.p) == 0
    assert pair.p.counted("kvtransport_attempts_total") == 2
    last = records(tmp_path / "turns")[-1]
    assert last["request"] == "leg"
    assert last["outcome"] == ("pulled" if when == "running" else "aborted")
    # An aborted request's prompt was neither found, pulled nor computed.
    counted = pair.p.counted("kvtransport_tokens_total") - before
    assert counted == (len(prompt) if when == "running" else 0)


def test_shutdown_settles_and_closes_the_log(pairs: list[SimPair], tmp_path: Path) -> None:
    pair, prompt = retained(pairs, turn_log=str(tmp_path / "turns"))
    start_pull(pair, prompt)
    pair.p.close()
    assert records(tmp_path / "turns")[-1]["outcome"] == "aborted"
    assert not pair.p.side.telemetry._log.wanted
    assert (
        pair.p.side.telemetry._stats.data["counters"][
            "kvtransport_outcomes_total|direction=decode_to_prefill|outcome=aborted"
        ]
        == 1
    )


def test_history_that_parts_within_the_local_hit_is_a_content_mismatch(
    pairs: list[SimPair],
) -> None:
    pair, _ = retained(pairs)
    prompt = tokens(300)
    pair.p.add("seed", prompt, max_tokens=1)
    pair.p.finish("seed")
    edited = prompt[:100] + tokens(80, seed=5)
    answer, turn = pair.turn(edited)
    assert answer == reference(edited, 8)
    assert turn["local_tokens"] == 100 // BLOCK * BLOCK
    assert turn["outcome"] == outcomes.CONTENT_MISMATCH


def test_a_tail_that_differs_is_a_content_mismatch(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompt = retained(pairs)
    control = pair.p.side._engine.control

    def looked_up(chain: Any, **_: Any) -> Lookup:
        lookup = Lookup(chain, None, "", 0, 1.0, lambda: 0.0)
        lookup.tail_mismatch = True
        lookup.finish("no_holding")
        return lookup

    monkeypatch.setattr(control, "lookup", looked_up)
    _, turn = pair.turn(prompt)
    assert turn["outcome"] == outcomes.CONTENT_MISMATCH


def test_every_outcome_is_produced_somewhere() -> None:
    source = "".join(p.read_text() for p in Path(outcomes.__file__).parent.glob("*.py"))
    for name in outcomes.ALL:
        assert f"outcomes.{name.upper()}" in source, name


def test_lookups_without_a_result_are_timed_too(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs, lookup_timeout_s=0.3)
    hits = len(samples(pair.p, "kvtransport_lookup_seconds"))
    pair.turn(tokens(100, seed=7))
    assert len(samples(pair.p, "kvtransport_lookup_seconds")) == hits + 1
    pair.d.close()
    pair.p.add("orphan", prompt, params={"do_remote_decode": True})
    pair.p.finish("orphan")
    pair.p.run()
    assert len(samples(pair.p, "kvtransport_lookup_seconds")) == hits + 2


# -- predictions


def test_predicted_and_actual_step_times_are_compared(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs, recompute="cost_model", recompute_config=RATES)
    pair.turn(prompt)
    ratios = samples(pair.p, "kvtransport_compute_predicted_ratio")
    assert ratios
    assert all(ratio > 0 for ratio in ratios)
    assert samples(pair.d, "kvtransport_compute_predicted_ratio") == []


def test_the_record_of_a_turn_says_what_was_decided_and_why(
    pairs: list[SimPair], tmp_path: Path
) -> None:
    log = tmp_path / "turns"
    pair, prompt = retained(pairs, turn_log=str(log), recompute="cost_model",
                            recompute_config={**RATES, "compute_step_s": 1.0})  # fmt: skip
    pair.turn(prompt)
    first, second = records(log)
    assert first["outcome"] == "no_holding"
    assert first["decision"] == ""
    assert first["predicted_pull_s"] is first["predicted_compute_s"] is first["pull_s"] is None
    assert first["lookup_s"] > 0
    assert second["decision"] == "pull_sooner"
    assert second["predicted_pull_s"] > 0
    assert second["predicted_compute_s"] > 1.0
    assert second["pull_s"] > 0


def test_an_uncalibrated_decision_is_recorded_without_predictions(
    pairs: list[SimPair], tmp_path: Path
) -> None:
    pair, prompt = retained(pairs, turn_log=str(tmp_path / "turns"), recompute="cost_model")
    pair.turn(prompt)
    last = records(tmp_path / "turns")[-1]
    assert last["decision"] == "uncalibrated_threshold_reached"
    assert last["predicted_pull_s"] is None


def asked_and_learned(sim: Sim) -> tuple[list[Any], list[dict[str, Any]]]:
    """What the recompute policy of ``sim`` will be asked and told from now on."""
    policy = sim.side._engine.recompute
    asked: list[Any] = []
    told: list[dict[str, Any]] = []
    decide, observe = policy.decide, policy.observe_transfer
    policy.decide = lambda question: (asked.append(question), decide(question))[1]
    policy.observe_transfer = lambda **facts: (told.append(facts), observe(**facts))[1]
    return asked, told


def test_descriptors_are_asked_about_as_they_are_counted(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    asked, told = asked_and_learned(pair.p)
    pair.turn(prompt)
    assert asked[-1].descriptors == told[-1]["descriptors"]
    assert asked[-1].nbytes == told[-1]["nbytes"]
    blob = pair.p.worker.handshake().blob
    one = pair.p.side._engine.tables
    pair.p.side.set_ranks({(0, 0): blob, (0, 1): blob})
    assert pair.p.side._engine.tables == 2 * one


def test_what_was_queued_before_a_pull_is_no_part_of_its_price(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    asked, told = asked_and_learned(pair.p)
    pair.p.add("first", prompt, params={"do_remote_decode": True})
    pair.p.hold_results = True
    pair.p.run(lambda: bool(pair.p.side._turns["first"].loading_since_s))
    pair.p.add("second", prompt, params={"do_remote_decode": True})
    pair.p.run(lambda: bool(pair.p.side._turns["second"].loading_since_s))
    pair.p.hold_results = False
    pair.p.run()
    assert [question.queued_nbytes for question in asked] == [0, asked[0].nbytes]
    assert sorted(facts["nbytes"] for facts in told) == [asked[0].nbytes, 2 * asked[0].nbytes]


def test_the_policy_is_told_when_its_pull_begins(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    started: list[str] = []
    pair.p.side._engine.recompute.pull_started = lambda *, peer: started.append(peer)
    asked, _ = asked_and_learned(pair.p)
    pair.turn(prompt)
    assert started == [asked[0].peer]


def test_a_restarted_peer_keeps_its_price(pairs: list[SimPair]) -> None:
    """vLLM gives it a new engine id, but it is reached at the same address."""
    pair, prompt = retained(pairs, recompute="cost_model", recompute_config=RATES)
    _, told = asked_and_learned(pair.p)
    answer, _ = pair.turn(prompt, max_tokens=40)
    address = pair.d.address
    pair.d.close()
    pair.d = Sim("d", listen=address, peers=[pair.p.address])
    pair.wait_connected()
    prompt = prompt + answer + tokens(70, seed=2)
    answer, _ = pair.turn(prompt, max_tokens=40)
    pair.p.empty()
    _, turn = pair.turn(prompt + answer)
    assert turn["outcome"] == "pulled"
    assert len({facts["peer"] for facts in told}) == 2, "two lives"
    assert list(pair.p.side._engine.recompute.describe()["peers"]) == [address]


def test_only_prompts_that_are_computed_earlier_count_as_load(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    asked, _ = asked_and_learned(pair.p)
    params = {"do_remote_decode": True}
    pair.p.add("computed", tokens(150, seed=21), params={**params, "kvt_reuse": False})
    pair.p.add("undecided", tokens(170, seed=22), params=params)
    pair.p.add("asked", prompt, params=params)
    pair.p.add("later", tokens(190, seed=23), params={**params, "kvt_reuse": False})
    requests = pair.p.scheduler.requests
    turn = pair.p.side._turns["asked"]
    turn.lookup.wait(5.0)
    assert pair.p.side._resolve(turn)
    pair.p.side._promise(turn)
    assert (asked[-1].load_tokens, asked[-1].load_pairs) == (150, 150 * 75)
    assert len(requests) == 4
    pair.p.run()


# -- holdings and gauges


def test_holdings_added_and_refused_are_counted(pairs: list[SimPair]) -> None:
    pair, _ = retained(pairs, d={"retention": "off"})
    assert pair.p.counted("kvtransport_holdings_added_total", purpose="handoff") == 1
    assert pair.d.counted("kvtransport_holdings_added_total") == 0
    assert pair.d.counted("kvtransport_holdings_refused_total", reason="policy") == 1


def test_gauges_are_those_of_the_ledger_and_count_blocks_once(pairs: list[SimPair]) -> None:
    pair, _ = retained(pairs)
    # A second conversation that begins like the first one shares its blocks.
    pair.turn(tokens(300)[:160] + tokens(100, seed=3))
    engine = pair.d.side._engine
    pair.d.step()
    pair.d.side.telemetry._clock = lambda: 1e12
    pair.d.step()
    gauges, now = pair.d.stats.data["gauges"], engine.ledger.snapshot()
    assert gauges["kvtransport_holdings|purpose=retained"] == now["retained"] == 2
    assert gauges["kvtransport_retained_blocks"] == now["retained_blocks"]
    assert gauges["kvtransport_retained_bytes"] == now["retained_blocks"] * engine.block_nbytes
    assert gauges["kvtransport_retained_bytes"] == now["retained_nbytes"]
    assert gauges["kvtransport_peers|state=connected"] == 1


def test_gauges_of_a_stepping_engine_are_at_most_a_second_old(pairs: list[SimPair]) -> None:
    pair, _ = retained(pairs)
    telemetry = pair.d.side.telemetry
    # What a status page needs takes too long for a step.
    pair.d.side._engine.ledger.snapshot = pytest.fail
    now = [1e6]
    telemetry._clock = lambda: now[0]
    assert telemetry.take([]) is not None
    now[0] += 0.5
    assert telemetry.take([]) is None
    now[0] += 0.6
    stats = telemetry.take([])
    assert stats is not None
    assert stats.data["gauges"]["kvtransport_leases"] == 0
    assert not stats.data["counters"]


# -- the log


def test_a_full_disk_ends_the_log_and_not_the_engine(
    pairs: list[SimPair], caplog: pytest.LogCaptureFixture
) -> None:
    pair, prompt = retained(pairs, turn_log="/dev/full")
    answer, _ = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert caplog.text.count("turn_log=/dev/full") == 1


def test_a_log_that_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turn_log="):
        TurnLog(str(tmp_path / "missing" / "turns"))


# -- which conversation


def names(log: Path) -> list[tuple[str, str]]:
    return [(r["conversation"], r["conversation_from"]) for r in records(log)]


def test_a_routers_name_for_the_conversation_reaches_both_logs(
    pairs: list[SimPair], tmp_path: Path
) -> None:
    p, d = tmp_path / "p", tmp_path / "d"
    pair = SimPair(p={"turn_log": str(p)}, d={"turn_log": str(d)})
    pairs.append(pair)
    for number in range(2):
        for conversation in ("a", "b"):
            params = {"kvt_conversation": conversation}
            pair.turn(tokens(100, seed=number), p_params=params)
    a, b = names(p)[:2]
    assert a != b
    assert a[1] == "router"
    assert names(p) == names(d) == [a, b, a, b]
    # Whatever a router calls it, the log has a digest.
    assert a[0] not in {"a", "b"}


def test_without_a_name_the_beginning_of_the_prompt_is_the_guess(
    pairs: list[SimPair], tmp_path: Path
) -> None:
    log = tmp_path / "turns"
    pair = SimPair(d={"turn_log": str(log)})
    pairs.append(pair)
    for seed in (1, 2):
        history = tokens(80, seed=seed)
        answer, _ = pair.turn(history)
        pair.turn(history + answer + tokens(20, seed=9))
    one, again, other, _ = names(log)
    assert one == again != other
    assert one[1] == "guess"
    # What an engine answers is no part of the guess: a repeated prompt is the same.
    for seed in (3, 4):
        prompt = tokens(30, seed=5)
        pair.d.add(f"direct-{seed}", prompt, max_tokens=seed, params={"do_remote_prefill": True})
        pair.d.finish(f"direct-{seed}")
        pair.d.run()
    assert len(set(names(log)[4:])) == 1
