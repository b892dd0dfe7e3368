from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_secret_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVT_CLUSTER_SECRET", raising=False)
