"""The decode engine is killed: the turn still finishes, and so does the next one."""

from __future__ import annotations

import random

from kvtransport_vllm.launch import wait_ready

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def ids(answer) -> list[int]:
    return answer["choices"][0]["token_ids"]


def test_killed_decode_engine_costs_the_reuse_and_nothing_else(pair, reference):
    rng = random.Random(61)
    prompt = [rng.randint(0x20, 0x7E) for _ in range(500)]
    first = pair.prefill.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
    answer = pair.decode.complete(
        prompt, max_tokens=80, kv_transfer_params=first["kv_transfer_params"]
    )
    prompt = prompt + ids(answer) + [0x20] * 40
    pair.prefill.reset_prefix_cache()
    pair.decode.kill()
    expected = ids(reference.complete(prompt, max_tokens=16))
    try:
        first = pair.prefill.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
        assert ids(first) == expected[:1]
        assert first["kv_transfer_params"]["kvt_turn"]["pulled_tokens"] == 0
    finally:
        # The same address, another life.
        pair.decode.start()
        wait_ready([pair.decode])
        pair.decode.warm_up()
    first = pair.prefill.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
    assert ids(first) == expected[:1]
    answer = pair.decode.complete(
        prompt, max_tokens=16, kv_transfer_params=first["kv_transfer_params"]
    )
    assert ids(answer) == expected
    pair.decode.await_counter(
        "kvtransport_outcomes_total", 1, direction="prefill_to_decode", outcome="pulled"
    )
    assert pair.prefill.running
