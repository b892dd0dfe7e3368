"""Real vLLM engines on a random-weights model, started once for all tests here.

``pair`` has the connector on both engines; ``reference`` is a plain engine
whose answers are the truth.  Run with another interpreter to test another vLLM
version: engines are started with the one that runs pytest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtransport_vllm.launch import (
    Engine,
    EnginePair,
    EngineSpec,
    PairSpec,
    free_ports,
    prepare_random_model,
    wait_ready,
)

_HERE = Path(__file__).parent
_LOGS = pytest.StashKey[Path]()

# Starting engines takes a minute or two and counts into the first test's time.
_TIMEOUT_S = 420


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    logs = item.config.stash.get(_LOGS, None)
    if report.failed and logs is not None and _HERE in item.path.parents:
        for log in sorted(logs.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-40:]
            report.sections.append((f"end of {log}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory, pytestconfig) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    pytestconfig.stash[_LOGS] = folder
    return folder


@pytest.fixture(scope="session")
def random_model() -> Path:
    return prepare_random_model()


@pytest.fixture(scope="session")
def pair(random_model, engine_logs):
    """Prefill and decode engine with the connector over the host backend."""
    # Development mode has the call that empties the prefix cache.
    spec = PairSpec(
        model=random_model,
        logs=engine_logs / "pair",
        common={"env": {"VLLM_SERVER_DEV_MODE": "1"}},
    )
    with EnginePair(spec) as running:
        yield running.start()


@pytest.fixture(scope="session")
def reference(random_model, engine_logs):
    """A plain engine without any connector."""
    (port,) = free_ports(1)
    spec = EngineSpec(
        model=random_model, name="reference", port=port, log=engine_logs / "reference.log"
    )
    with Engine(spec) as running:
        running.start()
        wait_ready([running])
        running.warm_up()
        yield running
