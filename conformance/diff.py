"""What changed between two reports, check by check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtransport_conformance.statuses import FAILING


@dataclass(frozen=True, slots=True)
class Change:
    """``verdict`` is one of: regressed, fixed, revision changed, added, gone, changed."""

    check: str
    before: str
    after: str
    verdict: str


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """List the checks whose status, teardown or presence differs, in catalogue order."""
    old, new = before["checks"], after["checks"]
    changes = []
    for key in sorted(set(old) | set(new)):
        if key not in new:
            verdict = "regressed" if old[key]["status"] == "PASS" else "gone"
            changes.append(Change(key, _word(old[key]), "-", verdict))
        elif key not in old:
            changes.append(Change(key, "-", _word(new[key]), "added"))
        elif _word(old[key]) != _word(new[key]):
            changes.append(Change(key, _word(old[key]), _word(new[key]), _verdict(old, new, key)))
    return changes


def _word(entry: Mapping[str, Any]) -> str:
    teardown = entry["teardown"]
    return f"{entry['status']}/{teardown}" if teardown == "LEAK" else str(entry["status"])


def _verdict(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> str:
    # A check that now means something else says nothing about the backend's progress.
    if old[key]["revision"] != new[key]["revision"]:
        return "revision changed"
    if _failed(new[key]) and not _failed(old[key]):
        return "regressed"
    if old[key]["status"] == "PASS" and new[key]["status"] != "PASS" and not _failed(old[key]):
        return "regressed"
    return "fixed" if _failed(old[key]) and not _failed(new[key]) else "changed"


def _failed(entry: Mapping[str, Any]) -> bool:
    return entry["status"] in FAILING or entry["teardown"] == "LEAK"


def regressed(changes: list[Change]) -> bool:
    """Whether anything that held before is not shown to hold now."""
    return any(change.verdict == "regressed" for change in changes)
