"""The report: JSON is the source, everything else is rendered from it.

``complete`` becomes true with the last write only, so that a run which was
itself killed leaves a report that says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtransport_conformance import SUITE_VERSION, evidence, flags
from kvtransport_conformance.plan import suite_digest
from kvtransport_conformance.profiles import PROFILES, Graded, ProfileResult, evaluate, overall
from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.results import CheckResult
from kvtransport_conformance.statuses import FAILING, Outcome, Status, Teardown

if TYPE_CHECKING:
    from kvtransport_conformance.registry import Check
    from kvtransport_conformance.session import Session

SCHEMA = "kvt-report/1"
Report = dict[str, Any]


def build(session: Session, *, complete: bool) -> Report:
    """Assemble a report of what ``session`` knows; checks without a result are NOT_RUN."""
    plan = session.plan
    results = {key: session.results.get(key, _no_result()) for key in plan.checks}
    facts = session.facts
    seen = evidence.judge(facts, session.moved, session.counters)
    checks = {
        key: results[key].wire(entry.level, entry.revision) | {
            "name": entry.name, "profiles": dict(entry.profiles)
        }
        for key, entry in plan.checks.items()
    }  # fmt: skip
    report: Report = {
        "schema": SCHEMA,
        "complete": complete,
        "suite": {
            "version": SUITE_VERSION,
            "digest": suite_digest(),
            "plan": len(plan.checks),
            "plan_digest": plan.digest,
            "profiles": list(plan.profiles),
            "excluded": plan.excluded,
            "seed": plan.seed,
            "settings": dict(session.request_settings),
        },
        "backend": _backend(session),
        "implementation": facts.get("implementation", {}),
        "environment": _environment(facts, seen),
        "setup": {"status": session.setup.status.value, "why": session.setup.why},
        "capabilities": _capabilities(facts.get("capabilities"), plan.checks, results),
        "checks": checks,
        "waivers": [
            {"check": key, "url": waiver.url, "until": waiver.until.isoformat()}
            for key, waiver in sorted(session.options.waivers.items())
        ],
        "overrides": sorted(session.options.skips),
        "rerun": session.rerun,
    }
    report["profiles"] = profiles_of(report)
    report["result"] = overall_of(report).value
    report["content_digest"] = content_digest(report)
    return report


def _no_result() -> CheckResult:
    return CheckResult(Status.NOT_RUN, Teardown.UNKNOWN, why="the run ended before this check")


def _backend(session: Session) -> dict[str, Any]:
    """Identity of the backend; options as a person wrote them, not with filled in addresses."""
    if "backend" not in session.facts:
        return _unknown_backend(session)
    found = dict(session.facts["backend"])
    if session.options.asked is not None:
        config = session.options.asked.get("config", {})
        found["config"] = {key: str(value) for key, value in sorted(config.items())}
    return found


def _unknown_backend(session: Session) -> dict[str, Any]:
    name = session.target.get("backend") or session.target.get("ref", "unknown")
    return {"name": str(name), "dist": "unknown", "version": "unknown", "spi": 0}


def _environment(facts: Mapping[str, Any], seen: evidence.Evidence) -> dict[str, Any]:
    process = facts.get("process", {})
    return {
        "tier": seen.tier,
        "tier_text": seen.text,
        "why_tier": seen.why,
        "emulated": seen.emulated,
        "hosts": seen.hosts,
        "devices": [dict(device) for device in seen.devices],
        "nics": list(seen.nics),
        "probe": dict(facts.get("probe", {}).get("details", {})),
        "os": process.get("os", f"{platform.system()} {platform.release()}"),
        "python": facts.get("python", platform.python_version()),
        "cpus": process.get("cpus", os.cpu_count()),
    }


def _capabilities(
    declared: flags.Declared | None,
    checks: Mapping[str, Check],
    results: Mapping[str, CheckResult],
) -> dict[str, Any]:
    """Each flag with its declared value and what the run found out about it."""
    if declared is None:
        return {}
    found: dict[str, Any] = {}
    for flag in flags.FLAGS:
        by = [key for key, entry in checks.items() if flag.key in entry.covers]
        states = {results[key].status for key in by}
        passed = [key for key in by if results[key].status is Status.PASS]
        if states & FAILING:
            state = "refuted"
            passed = [key for key in by if results[key].status in FAILING]
        elif not flag.holds(declared):
            refused = [key for key in by if results[key].status is Status.NOT_SUPPORTED]
            state = "refused" if refused and flag.refusable else "absent"
            passed = refused if flag.refusable else []
        else:
            state = "verified" if passed else "unverified"
        found[flag.key] = {"declared": flag.declared(declared), "state": state, "by": passed}
    for name in ("memory", "detection_bound_s", "min_align", "max_region_bytes", "max_regions",
                 "max_descriptors", "max_transfer_bytes", "max_notify_bytes",
                 "max_in_flight"):  # fmt: skip
        found[name] = {"declared": declared[name], "state": "unverified", "by": []}
    return found


def profiles_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Compute every profile of the plan from the report's own checks."""
    found: dict[str, Any] = {}
    for name in report["suite"]["profiles"]:
        found[name] = _wire(_profile(report, name))
    for kind in device_kinds(report):
        found[f"KVT-DEVICE[{kind}]"] = _wire(_device_profile(report, kind))
    return found


def _profile(report: Mapping[str, Any], name: str) -> ProfileResult:
    graded = {
        key: Graded(Status(entry["status"]), Teardown(entry["teardown"]), entry["profiles"][name])
        for key, entry in report["checks"].items()
        if name in entry["profiles"]
    }
    for key, levels in report["suite"]["excluded"].items():
        if name in levels:
            graded[key] = Graded(Status.NOT_RUN, Teardown.UNKNOWN, levels[name])
    setup = report["setup"]
    if setup["status"] in FAILING and PROFILES[name].gates:
        empty = evaluate(PROFILES[name], graded, declared=True)
        why = f"{setup['status']} while loading or opening the backend"
        return ProfileResult(Outcome.FAILURE, empty.core, empty.extended, why)
    about = PROFILES[name].about
    known = report["capabilities"]
    declared = about is None or not known or known[about]["state"] not in {"refused", "absent"}
    return evaluate(PROFILES[name], graded, declared=declared)


def device_kinds(report: Mapping[str, Any]) -> list[str]:
    """Kinds of device memory that the backend declares."""
    declared = report["capabilities"].get("memory", {}).get("declared", [])
    return sorted({kind for pair in declared for kind in pair} - {"host"})


def _device_profile(report: Mapping[str, Any], kind: str) -> ProfileResult:
    """A device profile needs the real device; an emulated one verifies nothing about it."""
    nothing = (0, 0, 0)
    environment = report["environment"]
    seen = [device for device in environment["devices"] if device["kind"] == kind]
    if not seen:
        reason = f"no {kind} device on either host"
        return ProfileResult(Outcome.NOT_VERIFIED, nothing, nothing, reason)
    if environment["tier"] not in {"E3", "E4"}:
        reason = f"only a simulated or emulated {kind} device was seen"
        return ProfileResult(Outcome.NOT_VERIFIED, nothing, nothing, reason)
    graded = {}
    for key, known in all_checks().items():
        level = known.profiles.get("KVT-DEVICE") or known.profiles.get("KVT-BASE")
        entry = report["checks"].get(key)
        if level and entry:
            status, teardown = Status(entry["status"]), Teardown(entry["teardown"])
            graded[key] = Graded(status, teardown, level)
        elif level:
            graded[key] = Graded(Status.NOT_RUN, Teardown.UNKNOWN, level)
    return evaluate(PROFILES["KVT-DEVICE"], graded, declared=True)


def _wire(result: ProfileResult) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "result": result.result.value,
        "core": list(result.core),
        "extended": list(result.extended),
    }
    if result.reason:
        entry["reason"] = result.reason
    return entry


def overall_of(report: Mapping[str, Any]) -> Outcome:
    """One word for the run: its gating profiles, device profiles aside."""
    results = [
        ProfileResult(Outcome(entry["result"]), (0, 0, 0), (0, 0, 0))
        for name, entry in report["profiles"].items()
        if name in PROFILES and PROFILES[name].gates
    ]
    return overall(results)


def content_digest(report: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of everything but the digest itself."""
    body = {key: value for key, value in report.items() if key != "content_digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def dumps(report: Report) -> str:
    """The report's file text: sorted, so that two reports can be compared line by line."""
    return json.dumps(report, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write(path: Path, report: Report) -> None:
    """Replace ``path`` atomically."""
    part = path.with_suffix(".part")
    part.write_text(dumps(report), encoding="utf-8")
    part.replace(path)


def load(path: Path) -> Report:
    """Read a report without judging it; raises ``ValueError`` when it is no JSON object."""
    report = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(report, dict):
        raise ValueError(f"{path} holds no report")  # noqa: TRY004
    return report
