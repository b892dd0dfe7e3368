from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MIB = 1 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("nixl_cu12") is None:
        reason = "NIXL is not installed: pip install --no-deps nixl-cu12==1.5.0"
        for item in items:
            if "nixl" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", params=["", "tcp"], ids=["cma", "tcp"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"transports": request.param}


@pytest.fixture
def there() -> Iterator[Callable[..., Any]]:
    yield from made_of("There")


@pytest.fixture
def here() -> Iterator[Callable[..., Any]]:
    yield from made_of("Here")


def made_of(kind: str) -> Iterator[Callable[..., Any]]:
    import support.nixl_side as sides

    made: list[Any] = []

    def make(config: dict[str, Any] | None = None, nbytes: int = 4 * MIB, **how: Any) -> Any:
        made.append(getattr(sides, kind)(how.pop("backend", "cuda"), config or {}, nbytes, **how))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def pair(here: Any, there: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """One backend here and one there, which this one has imported as peer 1."""
    remote = there(config)
    local = here(config)
    local.backend.import_peer(1, remote.export())
    return local, remote


@pytest.fixture(scope="module")
def module_pair(config: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    from support.nixl_side import Here, There

    remote = There("cuda", config, 4 * MIB)
    local = Here("cuda", config, 4 * MIB)
    local.backend.import_peer(1, remote.export())
    yield local, remote
    local.end()
    remote.end()


@pytest.fixture
def fresh(module_pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """As ``pair``, shared by a module's tests; memory and events as new."""
    local, remote = module_pair
    local.refill()
    remote.ask("refill", region=7, seed=1)
    return local, remote
