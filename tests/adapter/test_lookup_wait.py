"""A new request waits a moment for its lookup, so that it need not wait for a whole step."""

from __future__ import annotations

import pytest
from support.sim import SimPair
from support.turns import Silent, retained

from kvtransport_vllm import lookups

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def test_the_first_step_begins_the_pull(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_WAIT_S", 10.0)
    pair, prompt = retained(pairs)
    pair.p.add("turn", prompt, params=PREFILL)
    meta = pair.p.step().kv_connector_metadata
    assert [job.request_id for job in meta.pulls] == ["turn"]
    pair.p.finish("turn")


def test_silence_costs_a_step_no_more_than_its_patience_and_a_request_waits_once(
    pairs: list[SimPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_WAIT_S", 0.02)
    pair, prompt = retained(pairs)
    silent = {name: Silent() for name in ("one", "two", "three")}

    def arrive(name: str) -> None:
        pair.p.add(name, prompt, params=PREFILL)
        pair.p.side._turns[name].lookup = silent[name]

    arrive("one")
    arrive("two")
    pair.p.step()
    pair.p.step()
    assert [lookup.waits for lookup in silent.values()] == [[0.02], [], []]
    arrive("three")
    pair.p.step()
    assert [lookup.waits for lookup in silent.values()] == [[0.02], [], [0.02]]
    for name in silent:
        pair.p.abort(name)


def test_data_parallel_ranks_do_not_wait_for_lookups(pairs: list[SimPair]) -> None:
    pair, prompt = retained(pairs)
    pair.p.side._engine.alone = False
    pair.p.step()  # the next step begins with the patience that this one leaves
    pair.p.add("turn", prompt, params=PREFILL)
    lookup = pair.p.side._turns["turn"].lookup = Silent()
    pair.p.step()
    assert lookup.waits == []
    pair.p.abort("turn")
