"""Conversations on a real vLLM pair: same tokens as one plain engine, KV both ways."""

from __future__ import annotations

import random
import time

import pytest

from kvtransport_vllm.launch import Engine, EnginePair
from kvtransport_vllm.launch.http import post_json

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_FIRST, _LAST = 0x20, 0x7E


def text(length: int, seed: int) -> list[int]:
    """Tokens of the random model: one per printable byte."""
    return [random.Random(f"{seed}:{i}").randint(_FIRST, _LAST) for i in range(length)]


def ids(answer) -> list[int]:
    return answer["choices"][0]["token_ids"]


def turn(pair: EnginePair, prompt: list[int], *, max_tokens: int = 24, **body):
    """One turn the way a P/D router does it: the answer and P's account of the turn."""
    params = dict(PREFILL) | body.pop("kv", {})
    first = pair.prefill.complete(prompt, max_tokens=1, kv_transfer_params=params, **body)
    handoff = first["kv_transfer_params"]
    answer = pair.decode.complete(prompt, max_tokens=max_tokens, kv_transfer_params=handoff, **body)
    assert ids(answer)[0] == ids(first)[0]
    return ids(answer), handoff["kvt_turn"]


def forget(pair: EnginePair, engine: Engine | None = None) -> None:
    """Empty an engine's prefix cache, so that what it reuses was pulled."""
    (engine or pair.prefill).reset_prefix_cache()


def test_four_turns_same_tokens_and_pulled_history(pair, reference):
    prompt = text(400, 1)
    for number in range(4):
        forget(pair)
        answer, account = turn(pair, prompt)
        assert answer == ids(reference.complete(prompt, max_tokens=24))
        if number:
            # All of the history but the last answer's last token, which D never computed.
            assert account["pulled_tokens"] == len(prompt) - 30 - 1
            assert account["outcome"] == "pulled"
        prompt = prompt + answer + text(30, 100 + number)


def test_prefix_cache_of_prefill_engine_is_not_pulled_again(pair, reference):
    prompt = text(400, 2)
    answer, _ = turn(pair, prompt, max_tokens=100)
    prompt = prompt + answer + text(30, 3)
    answer, account = turn(pair, prompt)
    assert answer == ids(reference.complete(prompt, max_tokens=24))
    assert account["local_tokens"] == 384
    assert account["pulled_tokens"] == 400 + 99 - 384


EDITS = {
    "cut from the middle": lambda h: h[:100] + h[190:],
    "one token changed": lambda h: [*h[:137], _FIRST if h[137] != _FIRST else _LAST, *h[138:]],
    "line inserted first": lambda h: text(40, 9) + h,
    "same length, different text": lambda h: text(len(h), 10),
}
COMMON = dict(zip(EDITS, (100, 137, 0, 0), strict=True))


@pytest.mark.parametrize("edit", EDITS)
def test_edited_history_gives_the_answer_of_the_edit(pair, reference, edit):
    prompt = text(320, sum(map(ord, edit)))
    answer, _ = turn(pair, prompt)
    prompt = EDITS[edit](prompt + answer) + text(30, 11)
    forget(pair)
    answer, account = turn(pair, prompt)
    assert answer == ids(reference.complete(prompt, max_tokens=24))
    common = COMMON[edit] // 16 * 16
    assert account["pulled_tokens"] == (common if common >= 64 else 0)


def test_whole_prompt_retained_elsewhere(pair, reference):
    prompt = text(300, 12)
    answer, _ = turn(pair, prompt)
    forget(pair)
    again = (prompt + answer)[:-1]
    tokens, account = turn(pair, again)
    assert tokens == ids(reference.complete(again, max_tokens=24))
    assert account["recomputed_tokens"] == 1


def test_vllms_own_reset_gives_up_what_is_held(pair):
    """Without ``reset_external``, as after an update of weights."""
    prompt = text(300, 15)
    turn(pair, prompt)
    forget(pair)
    done = post_json(pair.decode.port, "/reset_prefix_cache", {})
    assert done["success"]
    _, account = turn(pair, prompt)
    assert account["outcome"] == "no_holding"


def test_tenants_with_one_text_share_nothing(pair):
    prompt = text(300, 13)
    turn(pair, prompt, cache_salt="tenant-a")
    forget(pair)
    _, account = turn(pair, prompt, cache_salt="tenant-b")
    assert account["pulled_tokens"] == 0
    forget(pair)
    _, account = turn(pair, prompt, cache_salt="tenant-a")
    assert account["pulled_tokens"] > 200


def counted(engine: Engine) -> tuple[float, float]:
    """Attempts and outcomes so far."""
    values = engine.metrics()
    names = ("kvtransport_attempts_total", "kvtransport_outcomes_total")
    return tuple(values.get(name, 0) for name in names)


def idle(engine: Engine, attempts: float = 0) -> float:
    """Attempts so far, once there are ``attempts`` and every one has its outcome."""
    deadline = time.monotonic() + 15
    while (now := counted(engine))[0] != now[1] or now[0] < attempts:
        assert time.monotonic() < deadline, f"attempts and outcomes stay at {now}"
        time.sleep(0.2)
    return now[0]


def test_counters_balance(pair):
    """Attempts count at a turn's beginning, outcomes at its end."""
    before = [idle(engine) for engine in pair.engines]
    turn(pair, text(300, 14))
    for engine, attempts in zip(pair.engines, before, strict=True):
        assert idle(engine, attempts + 1) == attempts + 1
