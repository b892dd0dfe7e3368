"""A report as one self-contained HTML page; it loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from kvtransport_conformance.render import words

_STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --bad: #cf222e; --open: #9a6700; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
code, pre { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.open { color: var(--open); } .note { overflow-wrap: anywhere; }
.banner { border: 1px solid var(--open); border-radius: .4rem; padding: .6rem .9rem;
  margin: 1rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
details pre { padding: .6rem; border: 1px solid var(--line); border-radius: .4rem; }
"""

_GOOD = {"PASS", "success", "verified", "CLEAN"}
_BAD = {"FAIL", "ERROR", "TIMEOUT", "CRASH", "failure", "refuted", "LEAK"}


def to_html(report: Mapping[str, Any]) -> str:
    """Render the whole report as a page."""
    backend = report["backend"]
    title = f"Conformance of {backend['name']}: {words.verdict(report['result'])}"
    body = "".join(
        (_head(report, title), _failures(report), _profiles(report), _checks(report),
         _capabilities(report))
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _head(report: Mapping[str, Any], title: str) -> str:
    backend, suite, environment = report["backend"], report["suite"], report["environment"]
    facts = {
        "Package": f"{backend['dist']} {backend['version']}",
        "Suite": f"{suite['version']}, {suite['plan']} checks, seed {suite['seed']}",
        "Evidence": environment["why_tier"],
        "Host": f"{environment['os']}, Python {environment['python']}",
        "Repeat": report["rerun"],
        "Checks": ", ".join(f"{count} {status}" for status, count in words.counts(report).items()),
    }
    entries = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    banner = f"<p class=banner>{escape(words.hardware(report))}</p>"
    if not report["complete"]:
        banner += "<p class=banner>This run did not finish; the report proves nothing.</p>"
    if report["setup"]["status"] != "PASS":
        text = f"{report['setup']['status']}: {report['setup']['why']}"
        banner += f"<p class=banner><code>{escape(text)}</code></p>"
    return f"<h1>{escape(title)}</h1>{banner}<dl>{entries}</dl>"


def _failures(report: Mapping[str, Any]) -> str:
    failed = words.failed_checks(report)
    if not failed:
        return ""
    parts = []
    for key, entry in failed:
        text = entry.get("why", "") or words.note(entry)
        head = f"{key} {entry['name']}: {entry['status']}, teardown {entry['teardown']}"
        parts.append(
            f"<details open><summary class=bad>{escape(head)}</summary>"
            f"<pre>{escape(text)}</pre></details>"
        )
    return f"<h2>Failures</h2>{''.join(parts)}"


def _profiles(report: Mapping[str, Any]) -> str:
    rows = (
        (name, _badge(entry["result"], words.verdict(entry["result"])), _tally(entry["core"]),
         _tally(entry["extended"]), escape(entry.get("reason", "")))
        for name, entry in report["profiles"].items()
    )  # fmt: skip
    heads = ("profile", "result", "core", "extended", "reason")
    return f"<h2>Profiles</h2><p>Counts: passed / failed / no verdict.</p>{_table(heads, rows)}"


def _checks(report: Mapping[str, Any]) -> str:
    rows = (
        (key, escape(entry["name"]), _badge(entry["status"]), _badge(entry["teardown"]),
         f"{entry['seconds']:.2f}", f"<span class=note>{escape(words.note(entry))}</span>")
        for key, entry in sorted(report["checks"].items())
    )  # fmt: skip
    return "<h2>Checks</h2>" + _table(("id", "name", "status", "teardown", "s", "note"), rows)


def _capabilities(report: Mapping[str, Any]) -> str:
    rows = (
        (escape(name), f"<code>{escape(str(entry['declared']))}</code>", _badge(entry["state"]),
         ", ".join(entry["by"]))
        for name, entry in report["capabilities"].items()
    )  # fmt: skip
    heads = ("flag", "declared", "found", "by")
    return "<h2>Declared capabilities</h2>" + _table(heads, rows)


def _tally(counts: list[int]) -> str:
    return " / ".join(map(str, counts))


def _badge(word: str, text: str = "") -> str:
    kind = "good" if word in _GOOD else "bad" if word in _BAD else "open"
    return f"<span class={kind}>{escape(text or word)}</span>"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
