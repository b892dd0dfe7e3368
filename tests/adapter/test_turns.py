"""Conversations through two real schedulers: what is pulled, and that answers are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.sim import BLOCK, SimPair, reference
from support.turns import tokens

from kvtransport.agent import Agent
from kvtransport.errors import DescriptorError
from kvtransport.layout.blocks import Pair
from kvtransport_vllm import tenants
from kvtransport_vllm.engine import agent_fingerprint
from kvtransport_vllm.meta import decode_rank_export

GROUP = 16


@pytest.fixture
def pair() -> Iterator[SimPair]:
    made = SimPair()
    yield made
    made.close()


def first_turn(pair: SimPair, prompt: list[int], max_tokens: int = 40) -> list[int]:
    answer, _ = pair.turn(prompt, max_tokens=max_tokens)
    assert answer == reference(prompt, max_tokens)
    return prompt + answer


def forget(pair: SimPair) -> None:
    """Empty P's prefix cache, so that what P reuses was pulled."""
    pair.p.empty()


def test_prompt_reaches_decode_engine(pair: SimPair) -> None:
    prompt = tokens(100)
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["outcome"] == "no_holding"
    assert turn["pulled_tokens"] == 0
    assert pair.d.counted("kvtransport_outcomes_total", outcome="pulled") == 1
    assert pair.d.counted("kvtransport_tokens_total", source="pulled") == 99
    assert pair.d.counted("kvtransport_pulled_bytes_total") == 7 * pair.d.side._engine.block_nbytes


def test_honest_extension_pulls_everything_beyond_the_local_hit(pair: SimPair) -> None:
    history = first_turn(pair, tokens(300))
    forget(pair)
    prompt = history + tokens(50, seed=1)
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    # The last sampled token's KV was never computed on D.
    assert turn["pulled_tokens"] == len(history) - 1
    assert turn["local_tokens"] == 0


def test_local_hit_is_not_pulled_again(pair: SimPair) -> None:
    history = first_turn(pair, tokens(300))
    prompt = history + tokens(50, seed=1)
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["local_tokens"] == 300 // BLOCK * BLOCK
    # 40 tokens of answer and the prompt's partial block: below the threshold of 64.
    assert turn["outcome"] == "policy"


EDITS: dict[str, Any] = {
    "cut": lambda h: h[:100] + h[190:],
    "one token": lambda h: [*h[:37], h[37] % 249 + 1, *h[38:]],
    "line first": lambda h: tokens(20, seed=9) + h,
    "same length": lambda h: tokens(len(h), seed=8),
}
COMMON = {"cut": 100, "one token": 37, "line first": 0, "same length": 0}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_history_pulls_only_the_common_prefix(pair: SimPair, edit: str) -> None:
    history = first_turn(pair, tokens(320))
    forget(pair)
    prompt = EDITS[edit](history) + tokens(40, seed=2)
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    common = COMMON[edit] // GROUP * GROUP
    expected = common if common >= 64 else 0  # kv_recompute_threshold
    assert turn["pulled_tokens"] == expected
    if common:
        divergences = pair.p.counted("kvtransport_content_divergence_total")
        assert divergences == 1


def test_whole_prompt_retained_still_computes_a_token(pair: SimPair) -> None:
    history = first_turn(pair, tokens(200))
    forget(pair)
    prompt = history[:150]
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["pulled_tokens"] == 144  # full groups of a longer holding
    prompt = history[:-1]
    forget(pair)
    answer, turn = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["pulled_tokens"] == len(prompt) - 1
    assert turn["recomputed_tokens"] == 1


def test_second_identical_turn_pulls_nothing_on_prefill(pair: SimPair) -> None:
    history = first_turn(pair, tokens(300))
    prompt = history + tokens(30, seed=3)
    forget(pair)
    pair.turn(prompt)
    _, turn = pair.turn(prompt)
    assert turn["pulled_tokens"] == 0
    assert turn["local_tokens"] == (len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("length", [1, 15, 16, 17, BLOCK * 3 - 1, BLOCK * 3, BLOCK * 3 + 1])
def test_every_prompt_length_is_answered_rightly(pair: SimPair, length: int) -> None:
    prompt = tokens(length)
    answer, _ = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    prompt = prompt + answer + tokens(5, seed=4)
    answer, _ = pair.turn(prompt)
    assert answer == reference(prompt, 8)


def test_two_tenants_never_share(pair: SimPair) -> None:
    prompt = tokens(200)
    pair.turn(prompt, salt="tenant-a", max_tokens=40)
    forget(pair)
    _, turn = pair.turn(prompt, salt="tenant-b")
    assert turn["outcome"] == "no_holding"
    assert turn["pulled_tokens"] == 0
    forget(pair)
    _, turn = pair.turn(prompt, salt="tenant-a")
    assert turn["pulled_tokens"] > 0


def test_a_quota_is_for_the_tenant_it_names(pairs: list[SimPair]) -> None:
    """From the salt of a request to the share of the budget."""
    quotas = {tenants.label("acme"): 0.5}
    pair = SimPair(d={"retention_config": {"tenant_quotas": quotas}})
    pairs.append(pair)
    for salt in ("acme", "acme.session", "other", None):
        pair.turn(tokens(100), salt=salt)
    shares = pair.d.side._engine.ledger.snapshot()["retention"]["tenants"]
    blocks = -(-107 // BLOCK)
    assert shares == {
        tenants.label("acme"): {"blocks": 2 * blocks, "share": 0.5},
        "(others)": {"blocks": 2 * blocks, "share": 0.5},
    }


def test_peers_may_only_read(pair: SimPair) -> None:
    known = agent_fingerprint(pair.d.side._engine.identity)
    stranger = Agent.open("host", name="stranger", fingerprint=known)
    with stranger:
        (engine,) = pair.d.side._engine.control.engines()
        peer = stranger.add_peer(decode_rank_export(engine.agents[0]).agent)
        mine = stranger.register(bytearray(64), name="mine")
        (theirs,) = peer.regions.values()
        with pytest.raises(DescriptorError, match="does not allow write"):
            stranger.write(peer, [Pair.ranges(mine, [0], theirs, [0], 64)])


def test_nothing_is_alive_while_a_conversation_is_retained(pair: SimPair) -> None:
    first_turn(pair, tokens(300))
    for sim in (pair.p, pair.d):
        assert not sim.scheduler.requests
        assert not sim.scheduler.has_requests()
    assert pair.d.side._engine.ledger.snapshot()["retained"] == 1
    # What was delivered to D is no longer held by P.
    pair.p.step()
    assert pair.p.free_blocks == pair.p.cache.num_blocks - 1


def test_reset_gives_up_what_is_retained(pair: SimPair) -> None:
    first_turn(pair, tokens(300))
    assert pair.d.free_blocks < pair.d.cache.num_blocks - 1
    pair.d.empty()
    assert pair.d.free_blocks == pair.d.cache.num_blocks - 1


def test_reuse_switched_off_for_one_request(pair: SimPair) -> None:
    history = first_turn(pair, tokens(300))
    forget(pair)
    answer, turn = pair.turn([*history, 7], p_params={"kvt_reuse": False})
    assert answer == reference([*history, 7], 8)
    assert turn["outcome"] == "disabled"
    assert turn["pulled_tokens"] == 0


HOSTILE = [
    {"tp_size": 2**31, "remote_port": 70000},
    {"remote_engine_id": ["x"], "kvt_ask": "all"},
    {"remote_engine_id": "e" * 10_000, "remote_host": "203.0.113.1", "remote_port": 1},
    {"remote_block_ids": list(range(10**6)), "kvt_ask": ["no-such-engine"]},
    {"remote_host": "203.0.113.1", "kvt_address_token": "forged"},
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_params_of_a_caller_choose_nothing(pair: SimPair, hostile: dict[str, Any]) -> None:
    history = first_turn(pair, tokens(200))
    forget(pair)
    prompt = history + tokens(20, seed=5)
    answer, _ = pair.turn(prompt, p_params=hostile)
    assert answer == reference(prompt, 8)
    pair.d.add("direct", prompt, max_tokens=8, params={"do_remote_prefill": True, **hostile})
    assert pair.d.finish("direct") == reference(prompt, 8)


def test_decode_engine_pulls_what_is_beyond_its_local_hit_however_little(pair: SimPair) -> None:
    """Computing there would delay the others' next tokens; the threshold is for P."""
    history = first_turn(pair, tokens(300))
    before = pair.d.counted("kvtransport_outcomes_total", outcome="pulled")
    prompt = history + tokens(10, seed=6)
    answer, _ = pair.turn(prompt)
    assert answer == reference(prompt, 8)
    assert pair.d.counted("kvtransport_outcomes_total", outcome="pulled") == before + 1


def test_unknown_name_asks_everybody(pair: SimPair) -> None:
    history = first_turn(pair, tokens(200))
    forget(pair)
    _, turn = pair.turn([*history, 7], p_params={"kvt_ask": ["decode-of-another-cluster"]})
    assert turn["outcome"] == "pulled"


def test_handoff_that_decode_does_not_want_is_freed_at_once(pair: SimPair) -> None:
    prompt = tokens(200)
    pair.p.add("leg", prompt, params={"do_remote_decode": True})
    pair.p.finish("leg")
    pair.p.run()
    assert pair.p.side._engine.ledger.snapshot()["handoffs"] == 1
    unwanted = pair.p.params["leg"] | {"kvt_reuse": False}
    pair.d.add("leg", prompt, max_tokens=2, params=unwanted)
    assert pair.d.finish("leg") == reference(prompt, 2)
    ledger = pair.p.side._engine.ledger
    end = time.monotonic() + 5
    while ledger.snapshot()["handoffs"]:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert ledger.snapshot()["counters"]["dropped.withdrawn"] == 1
