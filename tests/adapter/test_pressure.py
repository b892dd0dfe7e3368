"""Retention costs nothing when memory is short: same preemptions, same answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.sim import BLOCK, Sim, reference
from support.turns import tokens


@pytest.fixture
def engines() -> Iterator[list[Sim]]:
    made: list[Sim] = []
    yield made
    for sim in made:
        sim.close()


def small(engines: list[Sim], *, retention: str, blocks: int = 101) -> Sim:
    sim = Sim(
        "small",
        blocks=blocks,
        listen="tcp://127.0.0.1:0",
        retention=retention,
        retention_config={} if retention == "off" else {"budget_fraction": 1.0},
    )
    engines.append(sim)
    return sim


def test_holdings_yield_to_admission_without_preemption(engines: list[Sim]) -> None:
    sim = small(engines, retention="ttl")
    for i in range(6):
        sim.add(f"old-{i}", tokens(15 * BLOCK, i), max_tokens=2)
    sim.run()
    assert sim.free_blocks < 15  # six finished requests fill the cache
    assert not sim.scheduler.has_requests()
    prompts = {f"new-{i}": tokens(40 * BLOCK, 50 + i) for i in range(2)}
    for name, prompt in prompts.items():
        sim.add(name, prompt, max_tokens=4)
    sim.run()
    assert sim.preemptions == 0
    for name, prompt in prompts.items():
        assert sim.answers[name] == reference(prompt, 4)


def test_holdings_yield_to_growing_requests(engines: list[Sim]) -> None:
    """Decoding needs the memory bit by bit; nobody is preempted for a holding."""
    sim = small(engines, retention="ttl", blocks=61)
    sim.add("old", tokens(25 * BLOCK, 1), max_tokens=2)
    sim.run()
    for i in range(2):
        sim.add(f"new-{i}", tokens(5 * BLOCK, 10 + i), max_tokens=20 * BLOCK)
    sim.run(timeout_s=60)
    assert sim.preemptions == 0
    assert sim.answers["new-1"] == reference(tokens(5 * BLOCK, 11), 20 * BLOCK)


def burst(sim: Sim, seed: int) -> dict[str, list[int]]:
    """Far more work than fits at once, arriving in waves."""
    rng = random.Random(seed)
    prompts: dict[str, list[int]] = {}
    for wave in range(4):
        for i in range(6):
            name = f"{wave}-{i}"
            prompts[name] = tokens(rng.randrange(20, 400), rng.randrange(10**6))
            sim.add(name, prompts[name], max_tokens=rng.randrange(1, 60))
        for _ in range(rng.randrange(5, 60)):
            sim.step()
    sim.run(timeout_s=60)
    return prompts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_preemptions_equal_with_and_without_retention(engines: list[Sim], seed: int) -> None:
    without = small(engines, retention="off", blocks=61)
    with_it = small(engines, retention="ttl", blocks=61)
    burst(without, seed)
    prompts = burst(with_it, seed)
    assert with_it.preemptions <= without.preemptions
    assert with_it.answers == without.answers
    assert len(with_it.finished) == len(prompts)


def test_every_reference_comes_back(engines: list[Sim]) -> None:
    sim = small(engines, retention="ttl", blocks=61)
    burst(sim, 4)
    sim.empty()
    assert sim.free_blocks == sim.cache.num_blocks - 1


def test_budget_bounds_what_is_retained(engines: list[Sim]) -> None:
    sim = Sim(
        "budget",
        blocks=101,
        listen="tcp://127.0.0.1:0",
        retention="ttl",
        retention_config={"budget_fraction": 0.3},
    )
    engines.append(sim)
    for i in range(10):
        sim.add(f"old-{i}", tokens(9 * BLOCK, i), max_tokens=2)
        sim.run()
        assert sim.cache.num_blocks - 1 - sim.free_blocks <= 30
