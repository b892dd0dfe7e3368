"""Whatever the backend does, the report is complete and tells the truth."""

from __future__ import annotations

import pytest
from support.suite_runs import broken, run_checks

from kvtransport_conformance import verify

pytestmark = pytest.mark.timeout(240)

AROUND = ("REG-02", "DSC-01", "MD-04")
"""Checks without a transfer of 64 KiB: they must not suffer."""


def statuses(report):
    return {key: entry["status"] for key, entry in report["checks"].items()}


def sound(report):
    assert verify.problems(report) == []
    return report


def test_a_crash_costs_one_check():
    report = sound(run_checks(broken("CrashesInPost"), ("REG-01", *AROUND)))
    assert statuses(report) == {"REG-01": "CRASH"} | dict.fromkeys(AROUND, "PASS")
    why = report["checks"]["REG-01"]["why"]
    assert "worker was killed by SIGSEGV" in why
    assert "CrashesInPost" in why or "broken_backends.py" in why
    assert report["result"] == "failure"


def test_a_hang_costs_one_check_and_shows_where():
    report = sound(run_checks(broken("HangsInPost"), ("REG-01", *AROUND), watchdog_scale=0.2))
    assert statuses(report) == {"REG-01": "TIMEOUT"} | dict.fromkeys(AROUND, "PASS")
    assert "broken_backends.py" in report["checks"]["REG-01"]["why"]


def test_a_peer_that_dies_unasked_is_a_crash():
    report = sound(run_checks(broken("PeerCrashesIdle"), ("NTF-04",)))
    assert statuses(report) == {"NTF-04": "CRASH"}
    assert "peer was killed by SIGBUS" in report["checks"]["NTF-04"]["why"]


def test_printing_garbage_changes_nothing():
    report = sound(run_checks(broken("Prints"), ("REG-01", "CMP-01", *AROUND)))
    assert set(statuses(report).values()) == {"PASS"}


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("CrashesInOpen", "CRASH", "assertion failed: queue != NULL"),
        ("HangsInOpen", "TIMEOUT", "broken_backends.py"),
    ],
)
def test_a_backend_that_cannot_be_opened_fails_every_profile(name, status, words):
    report = sound(run_checks(broken(name), profiles=("KVT-BASE", "KVT-READ"), start_s=12.0))
    assert report["setup"]["status"] == status
    assert words in report["setup"]["why"]
    assert set(statuses(report).values()) == {"NOT_RUN"}
    assert {entry["result"] for entry in report["profiles"].values()} == {"failure"}
    assert report["environment"]["tier"] == "E0"


def test_an_absent_device_is_not_verified():
    report = sound(run_checks(broken("Unavailable"), profiles=("KVT-BASE",)))
    assert set(statuses(report).values()) == {"NOT_VERIFIED"}
    assert report["result"] == "not_verified"
    assert "no device of vendor 1234. Plug one in" in report["setup"]["why"]


def test_an_exception_of_the_driver_is_the_backends_fault():
    report = sound(run_checks(broken("RaisesOutside"), ("REG-01",)))
    assert statuses(report) == {"REG-01": "FAIL"}
    assert "cannot pin memory" in report["checks"]["REG-01"]["why"]


def test_the_budget_ends_a_run_honestly():
    report = sound(run_checks(broken("Prints"), ("REG-01", "REG-02"), budget_s=0.0))
    assert set(statuses(report).values()) == {"NOT_RUN"}
    assert "budget" in report["checks"]["REG-01"]["why"]
    assert report["result"] == "partial"
