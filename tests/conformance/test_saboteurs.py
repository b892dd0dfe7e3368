"""Broken backends are caught, each by the checks it names."""

from __future__ import annotations

import pytest

from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.saboteurs.base import all_saboteurs, apply
from kvtransport_conformance.saboteurs.campaign import CANNOT_FAIL, CONTROL, face, uncovered

SABOTEURS = all_saboteurs()
SOME = (
    "DropsTail", "LiesAboutCancel", "ReportsTwice", "RegistersTooMuch", "TrustsStaleHandles",
    "DiesOnGarbage", "LeaksDescriptor",
)  # fmt: skip
"""One of each kind; the others run with the slow tests."""


def test_no_check_without_a_saboteur():
    assert uncovered() == set()
    assert set(CANNOT_FAIL) < set(all_checks())


@pytest.mark.parametrize("name", SABOTEURS)
def test_what_a_saboteur_names_exists(name):
    entry = SABOTEURS[name]
    assert {*entry.caught_by, *entry.perhaps} <= set(all_checks())
    assert not set(entry.caught_by) & set(entry.perhaps)
    assert entry.fault.endswith(".")
    assert entry.caught_by or name == "PrintsGarbage"


def test_a_patch_of_something_that_is_gone_is_loud():
    with pytest.raises(AttributeError):
        apply({"kvtransport.inflight:InFlight.no_such_method": lambda original: original})


def caught_exactly(name):
    caught = face(SABOTEURS[name], full=False)
    assert caught.missed == set(), {key: caught.results[key] for key in caught.missed}
    assert caught.surprising == set(), {key: caught.results[key] for key in caught.surprising}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SOME)
def test_caught(name):
    caught_exactly(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(set(SABOTEURS) - set(SOME)))
def test_caught_all(name):
    caught_exactly(name)


def test_the_control_sample_is_cheap_and_broad():
    groups = {key.split("-")[0] for key in CONTROL}
    assert len(groups) >= 7
    assert all(not all_checks()[key].fresh for key in CONTROL)
