"""Conversations through routers: ours, and one that is not ours and knows nothing of us."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import httpx
import openai
import pytest

from kvtransport_vllm.launch import Service, free_ports, router_service, wait_ready

ROOT = Path(__file__).parents[2]
TURNS = 3
SYSTEM = "The old lighthouse keeper kept a diary of every ship that passed the point. " * 6
QUESTIONS = (
    "Which ship came first, and what did it carry in its hold that day?",
    "And which one came back, long after everybody had given it up for lost?",
    "Then what became of the keeper when the lamp went out for good?",
)


@pytest.fixture(scope="module")
def own_router(pair, engine_logs):
    router = router_service(
        prefill=[pair.prefill],
        decode=[pair.decode],
        port=free_ports(1)[0],
        log=engine_logs / "kvt-router.log",
    )
    with router:
        router.start()
        wait_ready([router], timeout_s=60)
        yield router


@pytest.fixture(scope="module")
def other_router(pair, engine_logs):
    """The router of the vLLM project, from its own environment ("make test" makes it)."""
    program = shutil.which("vllm-router") or ROOT / ".venv-vllm-router/bin/vllm-router"
    program = os.environ.get("KVT_TEST_VLLM_ROUTER", str(program))
    if not Path(program).exists():
        pytest.skip("no vllm-router here; make .venv-vllm-router/.ready installs it")
    port, prometheus = free_ports(2)
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
    command += ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    command += ["--prometheus-port", str(prometheus)]
    log = engine_logs / "vllm-router.log"
    with Service("vllm-router", command, port=port, log=log) as router:
        router.start()
        wait_ready([router], timeout_s=60)
        yield router


def converse(ask, salt):
    """Hold the conversation with ``ask(messages)``; the answers in order."""
    history = [{"role": "system", "content": f"{salt} {SYSTEM}"}]
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        answers.append(ask(history))
        history.append({"role": "assistant", "content": answers[-1]})
    return answers


def plain(reference, salt):
    """What one plain engine answers."""
    return converse(
        lambda messages: reference.chat(messages)["choices"][0]["message"]["content"], salt
    )


def pulled(engine, direction) -> float:
    return engine.counter("kvtransport_outcomes_total", direction=direction, outcome="pulled")


def settled(engine, direction, expected) -> float:
    """The counter, after the engine's next report or the deadline."""
    deadline = time.monotonic() + 20
    while pulled(engine, direction) < expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return pulled(engine, direction)


@pytest.fixture
def counted(pair):
    """Turns pulled in each direction since the test began, with P's cache emptied first."""
    pair.prefill.reset_prefix_cache()
    both = ((pair.decode, "prefill_to_decode"), (pair.prefill, "decode_to_prefill"))
    before = [pulled(engine, direction) for engine, direction in both]

    def since(*expected):
        return tuple(
            settled(engine, direction, start + target) - start
            for (engine, direction), start, target in zip(both, before, expected, strict=True)
        )

    return since


def test_openai_client_streams_through_our_router(pair, own_router, reference, counted):
    client = openai.OpenAI(base_url=f"{own_router.url}/v1", api_key="somebody", timeout=120)
    reports = []

    def ask(messages):
        pair.prefill.reset_prefix_cache()
        with client.chat.completions.with_streaming_response.create(
            model="model", messages=messages, max_tokens=16, temperature=0, stream=True
        ) as response:
            reports.append(json.loads(response.headers["x-kvt-prefill"]))
            chunks = response.parse()
            return "".join(
                choice.delta.content or "" for chunk in chunks for choice in chunk.choices
            )

    assert converse(ask, "ours") == plain(reference, "ours")
    assert counted(TURNS, TURNS - 1) == (TURNS, TURNS - 1)
    assert [report["outcome"] for report in reports[1:]] == ["pulled"] * (TURNS - 1)
    for report in reports[1:]:
        assert report["pulled_tokens"] > len(SYSTEM)


def test_drop_in_behind_a_router_that_knows_nothing_of_us(pair, other_router, reference, counted):
    def ask(messages):
        pair.prefill.reset_prefix_cache()
        body = {"model": "model", "messages": messages, "max_tokens": 16, "temperature": 0}
        text = ""
        with httpx.stream(
            "POST",
            f"{other_router.url}/v1/chat/completions",
            json={**body, "stream": True},
            timeout=120,
            trust_env=False,
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        text += choice["delta"].get("content") or ""
        return text

    assert converse(ask, "theirs") == plain(reference, "theirs")
    assert counted(TURNS, TURNS - 1) == (TURNS, TURNS - 1)
