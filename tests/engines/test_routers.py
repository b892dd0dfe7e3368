"""Conversations through routers: ours with an OpenAI client, and one we did not write."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvtransport_vllm.launch import EnginePair, Service, free_ports, router_service, wait_ready

FOREIGN = Path(__file__).parents[2] / ".venv-vllm-router" / "bin" / "vllm-router"
MODEL = "model"
ANSWER = 100  # long enough to pull back: the threshold is 64 tokens


def text(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij klmnop", k=length))


def stream(client: openai.OpenAI, prompt: str, **fields) -> str:
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=ANSWER, temperature=0, stream=True, **fields
    )
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(pieces) > 1, "the answer came in one piece"
    return "".join(pieces)


def client_of(service: Service, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def foreign(pair: EnginePair, engine_logs: Path) -> Iterator[Service]:
    """vllm-router in P/D mode: it copies P's kv_transfer_params into D's request."""
    if not FOREIGN.exists():
        pytest.fail(f"{FOREIGN} is missing: run these tests with 'make test-engines'")
    port, metrics = free_ports(2)
    command = [str(FOREIGN), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--vllm-pd-disaggregation"]
    command += ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    service = Service("vllm-router", command, port=port, log=engine_logs / "vllm-router.log")
    with service.start() as running:
        wait_ready([running], timeout_s=60)
        yield running


@pytest.fixture(scope="module")
def ours(pair: EnginePair, engine_logs: Path) -> Iterator[Service]:
    (port,) = free_ports(1)
    service = router_service(
        prefill=[pair.prefill], decode=[pair.decode], port=port, log=engine_logs / "router.log"
    )
    with service.start() as running:
        wait_ready([running], timeout_s=60)
        yield running


def outcomes(engine, direction: str) -> float:
    return engine.counter("kvtransport_outcomes_total", direction=direction, outcome="pulled")


def converse(service: Service, pair: EnginePair, reference, seed: int) -> None:
    client = client_of(service)
    history = text(400, seed)
    for turn in itertools.count(1):
        to_decode = outcomes(pair.decode, "prefill_to_decode")
        to_prefill = outcomes(pair.prefill, "decode_to_prefill")
        answer = stream(client, history)
        expected = reference.complete(history, max_tokens=ANSWER)["choices"][0]
        assert answer == expected["text"]
        pair.decode.await_counter(
            "kvtransport_outcomes_total",
            to_decode + 1,
            direction="prefill_to_decode",
            outcome="pulled",
        )
        if turn > 1:
            pair.prefill.await_counter(
                "kvtransport_outcomes_total",
                to_prefill + 1,
                direction="decode_to_prefill",
                outcome="pulled",
            )
        if turn == 3:
            return
        history += answer + text(40, seed + turn)


def test_streamed_conversation_behind_a_foreign_router(foreign, pair, reference):
    converse(foreign, pair, reference, seed=21)


def test_streamed_conversation_behind_our_router(ours, pair, reference):
    converse(ours, pair, reference, seed=31)


def test_chat_with_an_openai_client(ours, reference):
    client = client_of(ours)
    messages = [{"role": "system", "content": text(300, 41)}]
    for turn in range(3):
        messages.append({"role": "user", "content": text(60, 42 + turn)})
        chunks = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=32, temperature=0, stream=True
        )
        answer = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        expected = reference.chat(messages, max_tokens=32)["choices"][0]["message"]["content"]
        assert answer == expected
        messages.append({"role": "assistant", "content": answer})


def test_two_users_with_one_conversation_id_share_nothing(ours, pair, reference):
    prompt = text(300, 51)
    headers = {"X-Conversation-ID": "the-same"}
    first = stream(client_of(ours, "user-a"), prompt, extra_headers=headers)
    prompt_next = prompt + first + text(40, 52)
    pulled = outcomes(pair.prefill, "decode_to_prefill")
    pair.prefill.reset_prefix_cache()
    answer = stream(client_of(ours, "user-b"), prompt_next, extra_headers=headers)
    expected = reference.complete(prompt_next, max_tokens=ANSWER)["choices"][0]["text"]
    assert answer == expected
    assert outcomes(pair.prefill, "decode_to_prefill") == pulled
    pair.prefill.reset_prefix_cache()
    stream(client_of(ours, "user-a"), prompt_next, extra_headers=headers)
    pair.prefill.await_counter(
        "kvtransport_outcomes_total",
        pulled + 1,
        direction="decode_to_prefill",
        outcome="pulled",
    )
