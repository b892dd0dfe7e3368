"""One run that many tests look at, because starting processes takes seconds."""

from __future__ import annotations

import copy

import pytest
from support.suite_runs import HOST, run_checks

CHECKS = ("REG-01", "REG-02", "DSC-01", "DSC-03", "RD-02", "MD-01", "NTF-01", "PD-04", "SEC-02")


@pytest.fixture(scope="session")
def _host_report():
    return run_checks(HOST, CHECKS)


@pytest.fixture
def host_report(_host_report):
    """A report of a few checks of the real host backend; yours to edit."""
    return copy.deepcopy(_host_report)
