"""The options of ``pytest --pyargs kvtransport_conformance``.

pytest loads this module in every run where the package is installed, so it
imports nothing but pytest.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what names a backend and where its report goes."""
    group = parser.getgroup("kvt-conformance", "conformance of kvtransport backends")
    group.addoption("--kvt-backend", default="", help="backend to test, a registered name")
    group.addoption("--kvt-config", default="{}", help="its options as a JSON object")
    group.addoption("--kvt-report", default="", help="folder for the report of a run")
    group.addoption("--kvt-seed", type=int, default=None, help="repeat an earlier run")
