"""These tests run inside tests/efa_emulation/emulate.py only: ``make conformance-efa``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

LEVEL = os.environ.get("EFA_EMULATION_LEVEL", "")
KIND = "neuron" if LEVEL == "2" else "host"
MIB = 1 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LEVEL:
        return
    reason = "not inside tests/efa_emulation/emulate.py run (needs root): make conformance-efa"
    for item in items:
        if "backends/efa" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def kind() -> str:
    """Level 2 registers "device" memory, which the emulation keeps in the host's."""
    return KIND


@pytest.fixture
def config() -> dict[str, Any]:
    return json.loads(os.environ["EFA_EMULATION_CONFIG"])


@pytest.fixture
def there(config: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    from support.nixl_side import There

    prefix = tuple(shlex.split(os.environ["EFA_EMULATION_PEER_PREFIX"]))
    yield from made(There, config, prefix=prefix)


@pytest.fixture
def here(config: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    from support.nixl_side import Here

    yield from made(Here, config)


def made(side: type, config: dict[str, Any], **fixed: Any) -> Iterator[Callable[..., Any]]:
    sides: list[Any] = []

    def make(nbytes: int = 4 * MIB, **how: Any) -> Any:
        changed = {**config, **how.pop("config", {})}
        sides.append(side("efa", changed, nbytes, **{"kind": KIND, **fixed, **how}))
        return sides[-1]

    yield make
    for one in sides:
        one.end()


@pytest.fixture
def pair(here: Any, there: Any) -> tuple[Any, Any]:
    remote, local = there(), here()
    local.backend.import_peer(1, remote.export())
    return local, remote
