from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.host_pair import Pair, Remote

from kvtransport.agent import Agent


@pytest.fixture(params=["vm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_remote() -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(config: dict[str, Any] | None = None, name: str = "peer", **how: Any) -> Remote:
        made.append(Remote(config, name, **how))
        return made[-1]

    yield make
    for remote in made:
        remote.end()


@pytest.fixture
def make_agent() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(config: dict[str, Any] | None = None, name: str = "here") -> Agent:
        made.append(Agent.open("host", name=name, config=config or {}))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: Any, **kwargs: Any) -> Pair:
        made.append(Pair(*args, **kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.close()
