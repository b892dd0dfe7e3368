"""The demo's page: one HTML file with its charts inside, nothing loaded from elsewhere."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from conversation import EDITED, EDITED_QUESTION, QUESTIONS
from run import Result
from verdict import Finding, speedup

_WIDTH = 900
_LEFT = 80
_RIGHT = 90
_SOURCES = ("local", "pulled", "recomputed")
_COLOURS = {"local": "local", "pulled": "pulled", "recomputed": "computed"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What was run."""

    backend: str
    model: str
    prefix_caching: bool


def render(
    results: Sequence[Result],
    found: Sequence[Finding],
    setting: Setting,
    moved: Mapping[str, Mapping[str, float]],
) -> str:
    """The whole page; ``moved`` holds each engine's counters at the end."""
    template = Template((Path(__file__).parent / "page.html").read_text())
    return template.substitute(
        title=escape(_title(results)),
        lead=escape(_lead(setting)),
        findings="".join(
            f'<li class="{"yes" if each.holds else "no"}">{escape(each.text)}</li>'
            for each in found
        ),
        ttft=_ttft(results),
        sources=_sources(results),
        rows="\n".join(_row(each) for each in results),
        transcript="\n".join(_said(each) for each in results),
        setting=escape(_setting(setting, moved)),
    )


def _title(results: Sequence[Result]) -> str:
    answers = "the same answers" if all(each.same for each in results) else "DIFFERENT ANSWERS"
    return f"{speedup(results):.1f}x lower time to first token, {answers}"


def _lead(setting: Setting) -> str:
    cache = "on" if setting.prefix_caching else "off"
    return (
        "The same conversation twice on the same two vLLM engines: one computes prompts, the other "
        "generates answers. With reuse on, the prefill engine pulls the KV of earlier turns back "
        f"from the decode engine (backend {setting.backend}) instead of computing it again. Its "
        f"own prefix cache is {cache} in both runs."
    )


def _setting(setting: Setting, moved: Mapping[str, Mapping[str, float]]) -> str:
    pulled = {name: each.get("kvtransport_pulled_bytes_total", 0.0) for name, each in moved.items()}
    megabytes = ", ".join(f"{name} pulled {size / 1e6:,.0f} MB" for name, size in pulled.items())
    return (
        f"{setting.model} in float32, greedy, on {len(os.sched_getaffinity(0))} CPU cores "
        f"({platform.machine()}), no accelerator; both conversations together: {megabytes}. "
        "Times on a CPU say nothing about times on accelerators; that nothing but the reuse "
        "differs between the two runs holds anywhere."
    )


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{height}" rx="3" '
        f'fill="var(--{colour})"/>'
    )


def _text(x: float, y: float, text: str, *, soft: bool = False, anchor: str = "start") -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _svg(height: int, label: str, parts: Iterable[str]) -> str:
    inside = "".join(parts)
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return f"{head}{inside}</svg>"


def _ttft(results: Sequence[Result]) -> str:
    longest = max(max(each.off.ttft_s, each.on.ttft_s) for each in results)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = []
    for at, each in enumerate(results):
        top = at * 62
        parts.append(_text(0, top + 30, each.turn.title))
        for line, (colour, answer) in enumerate((("off", each.off), ("on", each.on))):
            width = answer.ttft_s * scale
            y = top + line * 24
            parts.append(_bar(_LEFT, y, width, 20, colour))
            label = f"{answer.ttft_s:.2f} s"
            if colour == "on":
                label += f"  ({each.speedup:.1f}x)"
            parts.append(_text(_LEFT + width + 8, y + 15, label, soft=colour == "off"))
    return _svg(len(results) * 62 - 14, "time to first token by turn", parts)


def _sources(results: Sequence[Result]) -> str:
    longest = max(1, *(each.on.tokens("prompt") for each in results))
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = []
    for at, each in enumerate(results):
        y = at * 38
        x: float = _LEFT
        parts.append(_text(0, y + 18, each.turn.title))
        for source in _SOURCES:
            width = each.on.tokens(source) * scale
            if width:
                parts.append(_bar(x, y, width, 26, _COLOURS[source]))
            x += width
        parts.append(_text(x + 8, y + 18, f"{each.on.tokens('prompt'):,}", soft=True))
    return _svg(len(results) * 38 - 12, "prompt tokens by source of their KV", parts)


def _row(each: Result) -> str:
    counts = [f"{each.on.tokens(kind):,}" for kind in ("prompt", *_SOURCES)]
    times = [f"{each.off.ttft_s:.2f} s", f"{each.on.ttft_s:.2f} s", f"{each.speedup:.1f}x"]
    state = "same" if each.same else "different"
    cells = "".join(f"<td>{cell}</td>" for cell in (each.turn.title, *counts, *times))
    return f'<tr>{cells}<td class="{state}">{state}</td></tr>'


def _said(each: Result) -> str:
    note = ""
    if each.turn.edits_history:
        note = (
            f'<p class="who">before this, the question &#8220;{escape(QUESTIONS[EDITED])}&#8221; '
            f"became &#8220;{escape(EDITED_QUESTION)}&#8221; in the history</p>"
        )
    answer = f"<p>{escape(each.on.text.strip())}</p>"
    if not each.same:
        answer += f'<p class="different">without reuse: {escape(each.off.text.strip())}</p>'
    return (
        f'<div class="said"><p class="who">{each.turn.title}</p>{note}'
        f"<p><strong>{escape(each.turn.question)}</strong></p>{answer}</div>"
    )
