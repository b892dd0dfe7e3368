"""Markdown, JUnit XML and HTML, all made from a report's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvtransport_conformance.render.html import to_html
from kvtransport_conformance.render.junit import to_junit
from kvtransport_conformance.render.markdown import to_markdown
from kvtransport_conformance.report import Report, dumps

RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {"report.md": to_markdown, "report.xml": to_junit, "report.html": to_html}
)


def write_all(folder: Path, report: Report) -> list[Path]:
    """Write ``report.json`` and everything made from it; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: render(report) for name, render in RENDERERS.items()}
    files = []
    # JSON last: as long as it says "incomplete", so does the folder.
    for name, text in [*texts.items(), ("report.json", dumps(report))]:
        path = folder / name
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
        files.append(path)
    return files
