"""The public support table, made from stored reports only; nobody edits it by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtransport.errors import ConfigError
from kvtransport_conformance import SUITE_VERSION
from kvtransport_conformance.render.words import NOT_ON_HARDWARE
from kvtransport_conformance.report import Report, load
from kvtransport_conformance.verify import problems

BEGIN = "<!-- conformance matrix: begin (made by `kvt conformance matrix`) -->"
END = "<!-- conformance matrix: end -->"
COLUMNS = ("KVT-BASE", "KVT-READ", "KVT-NOTIFY", "KVT-FAULT", "KVT-SCALE", "KVT-SECURE")
DASH = "\N{EN DASH}"
FAMILIES = ("cuda", "rocm", "neuron")
"""Families of accelerators whose reports the agnosticism sentence counts."""


def find_reports(paths: Iterable[Path]) -> list[Path]:
    """Expand folders to the report files below them; raises ``ConfigError`` for none."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not found:
        raise ConfigError("no report found; name report files or a folder that holds some")
    return found


def render(paths: Sequence[Path]) -> str:
    """The table of stored reports; raises ``ConfigError`` for one that ``verify`` rejects."""
    return table([_verified(path) for path in paths])


def table(reports: Iterable[Report]) -> str:
    """Return the table and its sentences as Markdown, ending in a newline."""
    whole = [r for r in sorted(reports, key=_order) if r["complete"] and _age(r) < 2]
    heads = ["backend", "path tested", *[name.removeprefix("KVT-") for name in COLUMNS], "hardware"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [_row(report) for report in whole]
    lines += ["", _legend(), "", hardware_sentence(whole), "", agnostic_sentence(whole)]
    return "\n".join(lines) + "\n"


def _verified(path: Path) -> Report:
    try:
        report = load(path)
    except ValueError as error:
        raise ConfigError(f"{path} holds no report: {error}") from error
    wrong = problems(report)
    if wrong:
        raise ConfigError(f"{path} cannot be in the table: {wrong[0]}")
    return report


def _order(report: Report) -> tuple[str, ...]:
    backend = report["backend"]
    return (backend["dist"], backend["name"], _mode(report), report["suite"]["version"])


def _age(report: Report) -> int:
    """Suite versions between then and now; older reports leave the headline table."""
    then, now = ([int(part) for part in text.split(".")]
                 for text in (report["suite"]["version"], SUITE_VERSION))  # fmt: skip
    return (now[0] - then[0]) * 100 + now[1] - then[1]


def _row(report: Report) -> str:
    backend = report["backend"]
    name = f"`{backend['name']}`"
    if backend["dist"] not in {"kvtransport", "unknown"}:
        name += f" ({backend['dist']} {backend['version']})"
    cells = [name, _mode(report)]
    cells += [_cell(report, column) for column in COLUMNS]
    return f"| {' | '.join([*cells, _hardware(report)])} |"


def _mode(report: Report) -> str:
    """What the data really went through, in a few words."""
    if report["setup"]["status"] == "NOT_VERIFIED":
        return "none: cannot run here"
    config = report["backend"].get("config") or {}
    options = ", ".join(f"{key} {value}" for key, value in sorted(config.items()))
    place = "2 hosts" if report["environment"]["hosts"] > 1 else "1 host"
    if "two network namespaces" in report["environment"]["why_tier"]:
        place = "2 network namespaces"
    return f"{place}, {options}" if options else place


def _cell(report: Report, profile: str) -> str:
    entry = report["profiles"].get(profile)
    if entry is None:
        return "? not verified"
    tier = report["environment"]["tier"]
    short = {"E1": "E1 (emulated)", "E2": "E2 (loopback)"}.get(tier, tier)
    if "two network namespaces" in report["environment"]["why_tier"] and tier == "E2":
        short = "E2 (namespaces)"
    return {
        "success": f"✔ {short} {report['suite']['version']}",
        "failure": f"✘ failed {short}",
        "partial": f"partial {short}",
        "not_verified": "? not verified",
        "refused": f"{DASH} refused as declared",
    }[str(entry["result"])]


def _hardware(report: Report) -> str:
    environment = report["environment"]
    if environment["tier"] in {"E3", "E4"}:
        names = [f"{device['kind']} {device.get('name', '')}" for device in environment["devices"]]
        return f"{environment['tier']}: {', '.join([*names, *environment['nics']])}"
    return f"emulated, {NOT_ON_HARDWARE}" if environment["emulated"] else NOT_ON_HARDWARE


def _legend() -> str:
    return (
        "✔ passed, with the evidence tier (E1 emulated device, E2 host memory on a software path, "
        "E3 real device, E4 real device between two hosts) and the suite version; "
        f"{DASH} declared absent and refused; ? not verified."
    )


def hardware_sentence(reports: Sequence[Report]) -> str:
    """Say which backends were never seen on real hardware."""
    real = sorted({r["backend"]["name"] for r in reports if r["environment"]["tier"] >= "E3"})
    names = sorted({r["backend"]["name"] for r in reports} - set(real))
    if not real:
        return f"All backends: **{NOT_ON_HARDWARE}**."
    listed = ", ".join(f"`{name}`" for name in names)
    return f"On real hardware: {', '.join(real)}. **{NOT_ON_HARDWARE.capitalize()}**: {listed}."


def agnostic_sentence(reports: Sequence[Report]) -> str:
    """The project's claim, as far as reports of one suite version carry it."""
    passed: dict[str, set[str]] = {}
    for report in reports:
        if report["environment"]["tier"] < "E3":
            continue
        if all(
            report["profiles"].get(name, {}).get("result") == "success"
            for name in ("KVT-BASE", "KVT-FAULT")
        ):
            kinds = {device["kind"] for device in report["environment"]["devices"]}
            passed.setdefault(report["suite"]["version"], set()).update(kinds & set(FAMILIES))
    best = max(passed.values(), key=len, default=set())
    if len(best) >= 2:
        return f"kvtransport is accelerator-agnostic: verified on {', '.join(sorted(best))}."
    return (
        "kvtransport is *designed to be* accelerator-agnostic; the claim needs BASE and FAULT on "
        f"two families of real accelerators and has {len(best)}."
    )


def replace_in(text: str, table: str) -> str:
    """Return ``text`` with the table between the markers; raises ``ConfigError`` without them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"the file needs one line {BEGIN!r} and one line {END!r} after it")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table}{END}{tail}"
