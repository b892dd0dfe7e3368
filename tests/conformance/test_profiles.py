from __future__ import annotations

import pytest

from kvtransport_conformance.profiles import (
    EXIT_CODES,
    PROFILES,
    Graded,
    ProfileResult,
    evaluate,
    overall,
)
from kvtransport_conformance.statuses import Outcome, Status, Teardown

BASE = PROFILES["KVT-BASE"]
READ = PROFILES["KVT-READ"]


def graded(*entries):
    return {
        f"X-{n:02d}": Graded(Status(s), Teardown(t), level)
        for n, (s, t, level) in enumerate(entries)
    }


def core(status, teardown="CLEAN"):
    return (status, teardown, "core")


@pytest.mark.parametrize("status", ["FAIL", "ERROR", "TIMEOUT", "CRASH"])
@pytest.mark.parametrize("level", ["core", "extended"])
def test_anything_broken_fails_the_profile(status, level):
    found = evaluate(BASE, graded(core("PASS"), (status, "CLEAN", level)), declared=True)
    assert found.result is Outcome.FAILURE
    assert "X-01" in found.reason


def test_a_leak_fails_a_passing_check():
    found = evaluate(BASE, graded(core("PASS", "LEAK")), declared=True)
    assert found.result is Outcome.FAILURE


def test_unclean_and_info_do_not_fail():
    entries = graded(core("PASS", "UNCLEAN"), ("FAIL", "CLEAN", "info"))
    assert evaluate(BASE, entries, declared=True).result is Outcome.SUCCESS


@pytest.mark.parametrize(
    "status", ["NOT_SUPPORTED", "NOT_VERIFIED", "SKIPPED", "WAIVED", "NOT_RUN"]
)
def test_a_core_check_without_pass_is_partial(status):
    found = evaluate(BASE, graded(core("PASS"), core(status)), declared=True)
    assert found.result is Outcome.PARTIAL
    assert status in found.reason


def test_extended_ones_may_be_missing():
    entries = graded(core("PASS"), ("NOT_SUPPORTED", "CLEAN", "extended"))
    assert evaluate(BASE, entries, declared=True).result is Outcome.SUCCESS


def test_nothing_verified_is_never_success():
    entries = graded(core("NOT_VERIFIED"), ("NOT_VERIFIED", "CLEAN", "extended"))
    for declared in (True, False):
        assert evaluate(READ, entries, declared=declared).result is Outcome.NOT_VERIFIED
    assert evaluate(BASE, {}, declared=True).result is Outcome.NOT_VERIFIED


def test_declared_absent_is_refused():
    found = evaluate(READ, graded(core("NOT_SUPPORTED"), core("PASS")), declared=False)
    assert found.result is Outcome.REFUSED


@pytest.mark.parametrize("status", ["NOT_RUN", "SKIPPED", "WAIVED"])
def test_what_nobody_tried_was_not_refused(status):
    found = evaluate(READ, graded(core("NOT_SUPPORTED"), core(status)), declared=False)
    assert found.result is Outcome.PARTIAL


@pytest.mark.parametrize(
    ("words", "expected", "code"),
    [
        (["success", "success", "refused"], "success", 0),
        (["success", "partial"], "partial", 2),
        (["success", "not_verified"], "partial", 2),
        (["partial", "failure", "not_verified"], "failure", 1),
        (["not_verified", "not_verified"], "not_verified", 3),
        (["not_verified", "refused"], "not_verified", 3),
    ],
)
def test_overall_and_exit_code(words, expected, code):
    found = overall(ProfileResult(Outcome(word), (0, 0, 0), (0, 0, 0)) for word in words)
    assert found is Outcome(expected)
    assert EXIT_CODES[found] == code
