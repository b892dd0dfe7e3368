"""Multi-turn load on a real pair, played by ``bench_policies.py``, and its samples."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvtransport_vllm.launch import Engine, EnginePair
from kvtransport_vllm.launch.http import HttpStatusError

PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}

# What a request may end in besides its answer.  An engine that dies half-way
# closes the stream, which comes as an HTTPException or as an answer too short.
_BROKEN = (OSError, http.client.HTTPException, KeyError, IndexError, TypeError, ValueError)


@dataclass(frozen=True)
class Load:
    """The same conversations for every combination; lengths in tokens."""

    conversations: int
    turns: int
    system: int
    question: int
    answer: int
    think_s: float
    concurrency: int

    def script(self, seed: int) -> tuple[list[int], list[list[int]], list[float]]:
        """System prompt, questions and think times of one conversation."""
        rng = random.Random(seed)

        def text(length: int) -> list[int]:
            return [rng.randint(0x20, 0x7E) for _ in range(length)]

        # Prompts of very different lengths: no single threshold is right for all.
        system = text(rng.choice((self.system // 8, self.system // 2, self.system)))
        questions = [text(rng.randint(1, 2 * self.question)) for _ in range(self.turns)]
        return system, questions, [rng.expovariate(1 / self.think_s) for _ in range(self.turns)]


@dataclass(frozen=True)
class Turn:
    """One answered turn; ``tpot_s`` is None for an answer of one token."""

    seed: int
    number: int
    ttft_s: float
    tpot_s: float | None
    tokens: int
    pulled: int
    outcome: str
    """How the prefill engine's look at the decode engine's holdings ended."""


@dataclass
class Run:
    """What one run of one combination measured; times in seconds.

    ``refused`` and ``failed`` count requests; the rest of their conversations
    is not played.  ``preemptions`` is None when an engine could not be asked.
    """

    name: str
    repeat: int = 0
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    retained: list[float] = field(default_factory=list)
    preemptions: float | None = None
    refused: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    decode_outcomes: dict[str, float] = field(default_factory=dict)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(turn.outcome for turn in self.turns)


def warm_up(pair: EnginePair, load: Load, conversations: int) -> None:
    """Play a few conversations that nothing is measured of."""
    warm = Run("warm-up")
    for seed in range(10**6, 10**6 + conversations):
        converse(pair, load, seed, warm, threading.Lock())


def play(pair: EnginePair, load: Load, run: Run) -> Run:
    """Play the conversations of ``run``'s repeat and fill it."""
    lock = threading.Lock()
    outcomes = _decode_outcomes(pair.decode)
    before = _count(pair, "vllm:num_preemptions_total")
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(pair.decode, run, stop))
    sampler.start()
    try:
        began = time.perf_counter()
        # Repeats have conversations of their own; all combinations have the same ones.
        seeds = range(1000 * run.repeat, 1000 * run.repeat + load.conversations)
        with ThreadPoolExecutor(load.concurrency) as pool:
            list(pool.map(lambda seed: converse(pair, load, seed, run, lock), seeds))
        run.seconds = time.perf_counter() - began
    finally:
        stop.set()
        sampler.join()
    after = _count(pair, "vllm:num_preemptions_total")
    run.preemptions = None if before is None or after is None else after - before
    for outcome, count in _decode_outcomes(pair.decode).items():
        run.decode_outcomes[outcome] = count - outcomes[outcome]
    return run


def converse(pair: EnginePair, load: Load, seed: int, run: Run, lock: threading.Lock) -> None:
    """Play one conversation as a router would and a user who thinks between turns."""
    history, questions, thoughts = load.script(seed)
    for number, (question, thought) in enumerate(zip(questions, thoughts, strict=True)):
        if number:
            time.sleep(thought)
        history = history + question
        try:
            turn, answer = _turn(pair, load, history, seed, number)
        except _BROKEN as error:
            with lock:
                run.errors.append(f"conversation {seed}, turn {number}: {error!r}"[:300])
                if isinstance(error, HttpStatusError):
                    run.refused += 1
                else:
                    run.failed += 1
            return
        with lock:
            run.turns.append(turn)
        history = history + answer


def _turn(
    pair: EnginePair, load: Load, prompt: list[int], seed: int, number: int
) -> tuple[Turn, list[int]]:
    began = time.perf_counter()
    first = pair.prefill.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
    handoff = first["kv_transfer_params"]
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": load.answer,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "kv_transfer_params": handoff,
    }
    answer: list[int] = []
    times: list[float] = []
    for tokens in stream(pair.decode, body):
        answer += tokens
        times.append(time.perf_counter())
    if len(answer) != load.answer:
        raise ValueError(f"{len(answer)} tokens, not {load.answer}")
    account = handoff["kvt_turn"]
    turn = Turn(
        seed=seed,
        number=number,
        ttft_s=times[0] - began,
        tpot_s=(times[-1] - times[0]) / (len(answer) - 1) if len(answer) > 1 else None,
        tokens=len(answer),
        pulled=account["pulled_tokens"],
        outcome=account["outcome"],
    )
    return turn, answer


def stream(engine: Engine, body: dict[str, Any]) -> Iterator[list[int]]:
    """Token ids as they come; ``HttpStatusError`` when the engine refuses."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=300)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = response.read()[:300].decode(errors="replace")
            raise HttpStatusError("/v1/completions", response.status, text)
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice.get("token_ids"):
                        yield choice["token_ids"]
    finally:
        connection.close()


def _sample(decode: Engine, run: Run, stop: threading.Event) -> None:
    # Reading all metrics costs the machine something, so not more often.
    while not stop.wait(1.0):
        value = scrape(decode, "kvtransport_retained_bytes")
        if value is not None:
            run.retained.append(value)


def scrape(engine: Engine, name: str, **labels: str) -> float | None:
    """A metric's value; None when the engine does not answer in time."""
    try:
        return engine.counter(name, **labels)
    except (OSError, ValueError):
        return None


def _count(pair: EnginePair, name: str) -> float | None:
    values = [scrape(engine, name) for engine in pair.engines]
    return None if None in values else sum(value for value in values if value is not None)


def _decode_outcomes(decode: Engine) -> dict[str, float]:
    """How handoffs have ended on the decode engine so far."""
    return {
        outcome: scrape(decode, "kvtransport_outcomes_total", outcome=outcome) or 0.0
        for outcome in ("pulled", "policy", "local_hit", "no_holding", "lookup_timeout")
    }
