from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.loopback import CAPABILITIES, Loopback, LoopbackConfig

from kvtransport.agent import Agent
from kvtransport.errors import UndrainedError
from kvtransport.peer import Peer
from kvtransport.region import Region


@dataclass
class Side:
    agent: Agent
    backend: Loopback
    memory: np.ndarray
    region: Region


class Duo:
    """Two agents of one process that know each other; ``a`` reads from ``b``."""

    def __init__(self, nbytes: int = 1 << 16, options: Any = None, **capabilities: Any) -> None:
        self.config = LoopbackConfig(replace(CAPABILITIES, **capabilities))
        self.options = options
        self.a = self._side("a", nbytes, fill=0)
        self.b = self._side("b", nbytes, fill=None)
        self.peer: Peer = self.a.agent.add_peer(self.b.agent.metadata())
        self.back: Peer = self.b.agent.add_peer(self.a.agent.metadata())
        self.remote = self.peer.region("kv")

    def _side(self, name: str, nbytes: int, fill: int | None) -> Side:
        backend = Loopback()
        agent = Agent(backend, name=name, config=self.config, options=self.options)
        rng = np.random.default_rng(len(name))
        memory = (
            rng.integers(1, 255, nbytes, dtype=np.uint8)
            if fill is None
            else np.full(nbytes, fill, np.uint8)
        )
        return Side(agent, backend, memory, agent.register(memory, name="kv"))

    def close(self) -> None:
        for side in (self.a, self.b):
            side.backend.held = False
            with contextlib.suppress(UndrainedError):
                side.agent.close(drain_s=0.2)


@pytest.fixture
def make_duo() -> Iterator[type[Duo]]:
    made: list[Duo] = []

    class Tracked(Duo):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    yield Tracked
    for duo in made:
        duo.close()


@pytest.fixture
def duo(make_duo: type[Duo]) -> Duo:
    return make_duo()
