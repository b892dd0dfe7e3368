"""Two ranks on either side, over NIXL: rank r reads from rank r, both ways."""

from __future__ import annotations

import random

import pytest

from kvtransport_vllm.launch import EnginePair, PairSpec

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def wide_pair(random_model, engine_logs):
    spec = PairSpec(
        model=random_model,
        logs=engine_logs / "tp2",
        backend="cuda",
        common={"tensor_parallel": 2, "env": {"VLLM_SERVER_DEV_MODE": "1"}},
    )
    with EnginePair(spec) as running:
        yield running.start()


def ids(answer) -> list[int]:
    return answer["choices"][0]["token_ids"]


def test_two_ranks_each_way(wide_pair, reference):
    rng = random.Random(71)
    prompt = [rng.randint(0x20, 0x7E) for _ in range(300)]
    for number in range(3):
        wide_pair.prefill.reset_prefix_cache()
        first = wide_pair.prefill.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
        handoff = first["kv_transfer_params"]
        answer = wide_pair.decode.complete(prompt, max_tokens=24, kv_transfer_params=handoff)
        assert ids(answer) == ids(reference.complete(prompt, max_tokens=24))
        assert handoff["tp_size"] == 2
        if number:
            assert handoff["kvt_turn"]["pulled_tokens"] == len(prompt) - 31
        prompt = prompt + ids(answer) + [rng.randint(0x20, 0x7E) for _ in range(30)]
