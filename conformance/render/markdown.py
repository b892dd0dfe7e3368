"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtransport_conformance.render import words


def to_markdown(report: Mapping[str, Any]) -> str:
    """Render the whole report; failures first, then profiles, capabilities and checks."""
    parts = [_head(report), _failures(report), _profiles(report), _capabilities(report)]
    return "\n".join(part for part in [*parts, _checks(report)] if part) + "\n"


def _head(report: Mapping[str, Any]) -> str:
    backend, suite, environment = report["backend"], report["suite"], report["environment"]
    lines = [
        f"# Conformance of backend `{backend['name']}`: {words.verdict(report['result'])}",
        "",
        f"- Package: {backend['dist']} {backend['version']}, contract version {backend['spi']}",
        f"- Configuration: {_config(backend)}",
        f"- Suite: {suite['version']}, {suite['plan']} checks planned, seed {suite['seed']}",
        f"- Hardware: **{words.hardware(report)}**",
        f"- Evidence: {environment['why_tier']}",
        f"- Host: {environment['os']}, Python {environment['python']}, {environment['cpus']} CPUs",
        f"- Repeat: `{report['rerun']}`",
    ]
    if not report["complete"]:
        lines += ["", "**This run did not finish; the report proves nothing.**"]
    if report["setup"]["status"] != "PASS":
        lines += ["", f"**{report['setup']['status']}**: {_cell(report['setup']['why'])}"]
    return "\n".join(lines) + "\n"


def _config(backend: Mapping[str, Any]) -> str:
    config = backend.get("config") or {}
    return ", ".join(f"`{key}={value}`" for key, value in config.items()) or "defaults"


def _failures(report: Mapping[str, Any]) -> str:
    failed = words.failed_checks(report)
    if not failed:
        return ""
    lines = ["## Failures", ""]
    for key, entry in failed:
        lines += [f"### {key} {entry['name']}: {entry['status']}, teardown {entry['teardown']}", ""]
        lines += ["```", entry.get("why", "") or words.note(entry), "```", ""]
    return "\n".join(lines)


def _profiles(report: Mapping[str, Any]) -> str:
    rows = ["## Profiles", "", "Counts are passed / failed / without verdict.", ""]
    rows += ["| profile | result | core | extended | reason |", "|---|---|---|---|---|"]
    for name, entry in report["profiles"].items():
        core, extended = ("/".join(map(str, entry[key])) for key in ("core", "extended"))
        reason = _cell(entry.get("reason", ""))
        verdict = words.verdict(entry["result"])
        rows.append(f"| {name} | {verdict} | {core} | {extended} | {reason} |")
    return "\n".join(rows) + "\n"


def _capabilities(report: Mapping[str, Any]) -> str:
    if not report["capabilities"]:
        return ""
    rows = ["## Declared capabilities", "", "| flag | declared | found | by |", "|---|---|---|---|"]
    for name, entry in report["capabilities"].items():
        value = _cell(str(entry["declared"]))
        rows.append(f"| {name} | {value} | {entry['state']} | {', '.join(entry['by'])} |")
    return "\n".join(rows) + "\n"


def _checks(report: Mapping[str, Any]) -> str:
    rows = ["## Checks", "", "| id | name | status | teardown | s | note |"]
    rows.append("|---|---|---|---|---|---|")
    for key, entry in sorted(report["checks"].items()):
        note = _cell(words.note(entry))[:300]
        rows.append(
            f"| {key} | {entry['name']} | {entry['status']} | {entry['teardown']} "
            f"| {entry['seconds']} | {note} |"
        )
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
