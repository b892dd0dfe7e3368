"""Phrases that every rendering uses, so that all of them say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvtransport_conformance.statuses import FAILING

NOT_ON_HARDWARE = "not verified on real hardware"


def verdict(result: str) -> str:
    """One outcome in plain words."""
    return {
        "success": "success",
        "failure": "FAILURE",
        "partial": "partial",
        "not_verified": "not verified",
        "refused": "declared absent, refused as declared",
    }[result]


def hardware(report: Mapping[str, Any]) -> str:
    """What was under test, with the reservation that the tier asks for."""
    environment = report["environment"]
    tier = environment["tier"]
    if tier in {"E3", "E4"}:
        return f"{tier}, {environment['tier_text']}"
    kind = "EMULATED, " if environment["emulated"] else ""
    return f"{tier}, {kind}{environment['tier_text']}: {NOT_ON_HARDWARE}"


def failed_checks(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Checks that failed or leaked, by id."""
    return [
        (key, entry)
        for key, entry in sorted(report["checks"].items())
        if entry["status"] in FAILING or entry["teardown"] == "LEAK"
    ]


def counts(report: Mapping[str, Any]) -> dict[str, int]:
    """How many checks ended with each status."""
    return dict(sorted(Counter(entry["status"] for entry in report["checks"].values()).items()))


def note(entry: Mapping[str, Any]) -> str:
    """Why a check did not simply pass, or what it measured; one line."""
    words = [entry.get("why", "").split("\n")[0]]
    words += [f"left behind: {text}" for text in entry.get("residue", [])[:3]]
    if not any(words) and entry.get("detail"):
        words = [", ".join(f"{key} {value}" for key, value in entry["detail"].items())]
    if entry["teardown"] == "UNCLEAN":
        words.append(f"said: {entry.get('logs', ['?'])[0]}")
    return "; ".join(word for word in words if word)
