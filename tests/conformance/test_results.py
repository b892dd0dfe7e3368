from __future__ import annotations

from datetime import date

import pytest

from kvtransport_conformance.results import CheckResult, Waiver
from kvtransport_conformance.statuses import Status, Teardown

TODAY = date(2026, 11, 30)


def waiver(until=date(2027, 1, 31)):
    return Waiver("https://x.test/issues/1", until)


@pytest.mark.parametrize("status", [Status.FAIL, Status.TIMEOUT, Status.CRASH, Status.ERROR])
def test_a_known_failure_is_excused_until_its_date(status):
    result = CheckResult(status, why="tail is missing")
    excused = waiver().apply(result, TODAY)
    assert excused.status is Status.WAIVED
    assert "issues/1" in excused.why
    assert "tail is missing" in excused.why
    assert waiver(date(2026, 11, 29)).apply(result, TODAY).status is status
    assert waiver(TODAY).apply(result, TODAY).status is Status.WAIVED


def test_an_unexpected_pass_fails():
    found = waiver().apply(CheckResult(Status.PASS), TODAY)
    assert found.status is Status.FAIL
    assert "remove the waiver" in found.why


@pytest.mark.parametrize("status", [Status.NOT_SUPPORTED, Status.NOT_VERIFIED, Status.NOT_RUN])
def test_a_waiver_changes_nothing_else(status):
    result = CheckResult(status)
    assert waiver().apply(result, TODAY) is result


def test_a_known_leak_is_excused_too():
    leak = CheckResult(Status.PASS, Teardown.LEAK, residue=("fd 9",))
    excused = waiver().apply(leak, TODAY)
    assert (excused.status, excused.failed) == (Status.WAIVED, False)
    assert "fd 9" in excused.why
    both = waiver().apply(CheckResult(Status.FAIL, Teardown.LEAK), TODAY)
    assert (both.status, both.failed) == (Status.WAIVED, False)


def test_a_leak_is_a_failure():
    assert CheckResult(Status.PASS, Teardown.LEAK).failed
    assert not CheckResult(Status.PASS, Teardown.UNCLEAN).failed
