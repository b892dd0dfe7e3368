"""Profiles: named sets of checks, and how their results become one word.

``failure`` if any check of the profile failed, crashed, timed out or leaked;
``refused`` if the capability the profile is about is declared absent and every
core check was tried, so that its use was refused; ``not_verified`` if nothing of
it could run; ``partial`` if a core check is anything but PASS; else ``success``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvtransport_conformance.statuses import FAILING, Outcome, Status, Teardown


@dataclass(frozen=True, slots=True)
class Profile:
    """``about`` is the capability flag whose declared absence empties the profile."""

    name: str
    meaning: str
    about: str | None = None
    gates: bool = True
    default: bool = True


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("KVT-BASE", "moves bytes exactly and cleans up"),
            Profile("KVT-READ", "one-sided read: pull without the producer's thread", "ops.read"),
            Profile("KVT-NOTIFY", "notification after data: push mode", "notify"),
            Profile("KVT-FAULT", "safe under peer death, timeout, cancel and bad input"),
            Profile("KVT-SCALE", "production concurrency: many transfers, peers and threads"),
            Profile(
                "KVT-SECURE",
                "stale, forged and out-of-range access refused by the target",
                "target_enforces",
            ),
            Profile("KVT-LAYOUT", "block geometry and merging never change bytes"),
            Profile("KVT-DEVICE", "zero-copy on a device's memory", default=False),
            Profile("KVT-VLLM", "end to end through a real vLLM scheduler", default=False),
            Profile("KVT-PERF", "numbers with their environment; never gates", gates=False),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Graded:
    """A check's result as seen by one profile."""

    status: Status
    teardown: Teardown
    level: str


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """``core`` and ``extended`` count (passed, failed, without verdict)."""

    result: Outcome
    core: tuple[int, int, int]
    extended: tuple[int, int, int]
    reason: str = ""


_OPEN = frozenset({Status.NOT_RUN, Status.SKIPPED, Status.WAIVED})
"""Nobody tried: what is declared absent was not refused either."""


def evaluate(profile: Profile, graded: Mapping[str, Graded], *, declared: bool) -> ProfileResult:
    """Reduce the results of one profile's checks, keyed by id, to one word.

    ``declared`` says whether the capability the profile is about is declared.
    """
    core = [entry for entry in graded.values() if entry.level == "core"]
    extended = [entry for entry in graded.values() if entry.level == "extended"]
    counts = (_tally(core), _tally(extended))
    failed = sorted(key for key, entry in graded.items() if _fails(entry))
    if failed:
        return ProfileResult(Outcome.FAILURE, *counts, reason=f"failed: {', '.join(failed)}")
    statuses = {entry.status for entry in graded.values()}
    if not statuses or statuses - {Status.NOT_RUN} == {Status.NOT_VERIFIED}:
        return ProfileResult(Outcome.NOT_VERIFIED, *counts, reason="no check could run")
    if not profile.gates:
        return ProfileResult(Outcome.SUCCESS, *counts, reason="recorded, never gates")
    if not declared and not {entry.status for entry in core} & _OPEN:
        return ProfileResult(Outcome.REFUSED, *counts, reason=f"{profile.about} declared absent")
    missing = Counter(entry.status for entry in core if entry.status is not Status.PASS)
    if not core or missing[Status.NOT_VERIFIED] == len(core):
        return ProfileResult(Outcome.NOT_VERIFIED, *counts, reason="no core check could run")
    if missing:
        words = ", ".join(f"{count} {status}" for status, count in sorted(missing.items()))
        return ProfileResult(Outcome.PARTIAL, *counts, reason=f"core checks without PASS: {words}")
    return ProfileResult(Outcome.SUCCESS, *counts)


def _fails(entry: Graded) -> bool:
    if entry.level not in {"core", "extended"}:
        return False
    return entry.status in FAILING or entry.teardown is Teardown.LEAK


def _tally(entries: Iterable[Graded]) -> tuple[int, int, int]:
    passed = failed = other = 0
    for entry in entries:
        if _fails(entry):
            failed += 1
        elif entry.status is Status.PASS:
            passed += 1
        else:
            other += 1
    return passed, failed, other


def overall(results: Iterable[ProfileResult]) -> Outcome:
    """One word for a whole run; refused profiles count as kept promises."""
    words = {entry.result for entry in results}
    if Outcome.FAILURE in words:
        return Outcome.FAILURE
    words.discard(Outcome.REFUSED)
    if words <= {Outcome.NOT_VERIFIED}:
        return Outcome.NOT_VERIFIED if words else Outcome.SUCCESS
    return Outcome.SUCCESS if words == {Outcome.SUCCESS} else Outcome.PARTIAL


EXIT_CODES: Mapping[Outcome, int] = MappingProxyType(
    {
        Outcome.SUCCESS: 0,
        Outcome.REFUSED: 0,
        Outcome.FAILURE: 1,
        Outcome.PARTIAL: 2,
        Outcome.NOT_VERIFIED: 3,
    }
)
SUITE_ERROR = 4
