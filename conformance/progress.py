"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtransport_conformance.registry import Check
from kvtransport_conformance.render import words
from kvtransport_conformance.results import CheckResult
from kvtransport_conformance.statuses import Status, Teardown

_COLOURS = {"success": "green", "failure": "bold red", "PASS": "green"}


class Live:
    """A progress bar on a terminal, one line per noteworthy result everywhere."""

    def __init__(self, console: Console, total: int, *, verbose: bool) -> None:
        self._console = console
        self._verbose = verbose
        self._progress = Progress(
            TextColumn("[bold]{task.description:<30}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._progress.stop()

    def begin(self, check: Check) -> None:
        self._progress.update(self._task, description=f"{check.id} {check.name}"[:30])

    def end(self, check: Check, result: CheckResult) -> None:
        self._progress.advance(self._task)
        if not (self._verbose or result.failed or result.teardown is Teardown.UNCLEAN):
            return
        colour = "bold red" if result.failed else _COLOURS.get(result.status, "yellow")
        grade = "" if result.teardown is Teardown.CLEAN else f" teardown {result.teardown}"
        self._console.print(
            f"[{colour}]{result.status:<14}[/]{check.id} {check.name}"
            f"[{colour}]{grade}[/] {result.seconds:.1f} s",
            highlight=False,
        )
        for text in (result.why, *result.residue):
            if text and (result.failed or result.status is not Status.PASS):
                self._console.print(
                    f"              {escape(text)}", style="dim", highlight=False, soft_wrap=True
                )


def summary(console: Console, report: Mapping[str, Any]) -> None:
    """Print profiles, totals and the evidence; failures were printed as they came."""
    table = Table(title=f"backend {report['backend']['name']}, suite {report['suite']['version']}")
    for column in ("profile", "result", "core", "extended", "reason"):
        table.add_column(column, overflow="fold")
    for name, entry in report["profiles"].items():
        colour = _COLOURS.get(entry["result"], "yellow")
        core, extended = ("/".join(map(str, entry[key])) for key in ("core", "extended"))
        verdict = f"[{colour}]{words.verdict(entry['result'])}[/]"
        table.add_row(escape(name), verdict, core, extended, escape(entry.get("reason", "")))
    console.print(table)
    console.print("core and extended: passed / failed / without verdict", style="dim")
    totals = ", ".join(f"{count} {status}" for status, count in words.counts(report).items())
    console.print(f"checks    {totals}", highlight=False)
    console.print(f"hardware  {words.hardware(report)}", highlight=False)
    console.print(f"evidence  {report['environment']['why_tier']}", highlight=False)
    if report["setup"]["status"] != "PASS":
        status, why = report["setup"]["status"], report["setup"]["why"]
        console.print(f"[yellow]{status}[/]: {escape(why)}", highlight=False)
    console.print(f"repeat    {report['rerun']}", highlight=False, soft_wrap=True)
    colour = _COLOURS.get(report["result"], "yellow")
    console.print(f"result    [{colour}]{words.verdict(report['result'])}[/]")
