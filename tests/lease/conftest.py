from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import lease_peer

from kvtransport.lease.control import ControlPlane


@pytest.fixture(autouse=True)
def _no_secret_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVT_CLUSTER_SECRET", raising=False)


@pytest.fixture
def engine() -> Iterator[Callable[..., ControlPlane]]:
    """Make started control planes; all are closed afterwards."""
    made: list[ControlPlane] = []

    def make(engine_id: str, **arguments: Any) -> ControlPlane:
        made.append(lease_peer.make(engine_id, **arguments))
        return made[-1]

    yield make
    for control in made:
        control.close(5.0)
        assert control._thread is not None
        assert not control._thread.is_alive()
        assert control.counters["loop.error"] == 0


@pytest.fixture
def peer_process() -> Iterator[Callable[..., lease_peer.PeerProcess]]:
    """Start owners in processes of their own; all are ended afterwards."""
    made: list[lease_peer.PeerProcess] = []

    def make(**arguments: Any) -> lease_peer.PeerProcess:
        made.append(lease_peer.PeerProcess(**arguments))
        return made[-1]

    yield make
    for process in made:
        if process._process.poll() is None:
            process.kill()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Wait until something is true."""

    def wait(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "did not become true in time"
            time.sleep(0.01)

    return wait
