"""What tests of turns on two real schedulers begin with."""

from __future__ import annotations

import random
import time
from typing import Any

from support.sim import SimPair


class Silent:
    """A lookup that is not answered; keeps for how long it was waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def poll(self) -> None:
        return None

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        time.sleep(timeout_s)

    def cancel(self) -> None:
        return None


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids of the model-free engine."""
    return random.Random(seed).choices(range(1, 250), k=count)


def retained(
    pairs: list[SimPair], d: dict[str, Any] | None = None, **p: Any
) -> tuple[SimPair, list[int]]:
    """A pair in which D retains a conversation and P has forgotten it, and the next prompt."""
    pair = SimPair(p=p, d=d)
    pairs.append(pair)
    prompt = tokens(300)
    answer, _ = pair.turn(prompt, max_tokens=40)
    pair.p.empty()
    return pair, prompt + answer + tokens(30, seed=1)
