from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sim import SimPair


@pytest.fixture
def pairs() -> Iterator[list[SimPair]]:
    """Pairs of engines that are closed after the test."""
    made: list[SimPair] = []
    yield made
    for pair in made:
        pair.close()
