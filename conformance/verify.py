"""Whether a report is what the suite wrote: schema, plan, digests, totals.

This is tamper-evident, not tamper-proof: whoever edits a report and recomputes
its digest is not caught here.  Run the suite again to be sure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from kvtransport_conformance import SUITE_VERSION
from kvtransport_conformance.plan import digest_of, excluded, suite_digest
from kvtransport_conformance.profiles import PROFILES
from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.report import SCHEMA, content_digest, overall_of, profiles_of


def schema() -> Mapping[str, Any]:
    """The JSON Schema of reports, from the package."""
    text = resources.files("kvtransport_conformance").joinpath("schemas/report-1.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def problems(report: Any) -> list[str]:
    """Everything that is wrong with ``report``; empty when it is sound.

    Needs the package ``jsonschema``.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())
    broken = [
        f"schema: {'.'.join(map(str, error.absolute_path)) or 'report'}: {error.message}"
        for error in validator.iter_errors(report)
    ]
    if broken:
        return broken[:10]
    return [*_incomplete(report), *_digests(report), *_plan(report), *_totals(report)]


def notes(report: Mapping[str, Any]) -> list[str]:
    """What is no fault of the report but limits what this suite can say about it."""
    if report["suite"]["version"] != SUITE_VERSION:
        return [
            (
                f"made by suite {report['suite']['version']}, this is {SUITE_VERSION}: "
                "its plan and sources were not compared"
            )
        ]
    if report["suite"]["digest"] != suite_digest():
        return ["made by other sources of this suite version: a changed or a newer suite"]
    return []


def _incomplete(report: Mapping[str, Any]) -> list[str]:
    if report["schema"] != SCHEMA:
        return [f"schema is {report['schema']!r}, expected {SCHEMA!r}"]
    return [] if report["complete"] else ["the run did not finish: complete is false"]


def _digests(report: Mapping[str, Any]) -> list[str]:
    if report["content_digest"] != content_digest(report):
        return ["content_digest does not match: the report was edited after it was written"]
    return []


def _plan(report: Mapping[str, Any]) -> list[str]:
    found = []
    suite, checks = report["suite"], report["checks"]
    if suite["plan"] != len(checks):
        found.append(f"the plan had {suite['plan']} checks, the report has {len(checks)}")
    unknown = sorted(set(suite["profiles"]) - set(PROFILES))
    if unknown:
        return [*found, f"unknown profiles {unknown}"]
    if suite["version"] != SUITE_VERSION:
        return found
    known = all_checks()
    unknown = sorted(set(checks) - set(known))
    if unknown:
        return [*found, f"unknown checks {unknown}"]
    if digest_of(known[key] for key in checks) != suite["plan_digest"]:
        found.append("plan_digest does not match the checks in the report")
    if excluded(suite["profiles"], checks) != suite["excluded"]:
        found.append("checks are missing that the named profiles need")
    for key, entry in checks.items():
        if entry["profiles"] != dict(known[key].profiles) or entry["level"] != known[key].level:
            found.append(f"{key} has another level or profile than the suite gives it")
        if entry["revision"] != known[key].revision:
            found.append(f"{key} has revision {entry['revision']}, not {known[key].revision}")
    return found


def _totals(report: Mapping[str, Any]) -> list[str]:
    if not set(report["suite"]["profiles"]) <= set(PROFILES):
        return []  # said already
    computed = profiles_of(report)
    found = [
        f"profile {name}: the report says {report['profiles'].get(name)}, its checks give {entry}"
        for name, entry in computed.items()
        if report["profiles"].get(name) != entry
    ]
    extra = sorted(set(report["profiles"]) - set(computed))
    found += [f"profile {name} does not follow from the checks" for name in extra]
    if not found and report["result"] != overall_of(report).value:
        found.append(f"result is {report['result']!r}, the profiles give {overall_of(report)}")
    return found
