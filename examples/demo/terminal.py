"""The demo's output on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from run import Result
from verdict import Finding

from kvtransport_vllm.launch import Service


@contextmanager
def starting(console: Console, names: Sequence[str]) -> Iterator[Callable[[Service], None]]:
    """Show a line with a clock for each service; call the result when one is ready."""
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tasks = {name: progress.add_task(f"starting {name}", total=1) for name in names}

        def ready(service: Service) -> None:
            progress.update(tasks[service.name], completed=1, description=f"{service.name} ready")

        yield ready


def turns_table(results: Sequence[Result]) -> Table:
    """Tokens of the prefill engine with reuse, and both times to first token."""
    table = Table(
        title="prefill engine, per turn (reuse on)",
        title_justify="left",
        box=None,
        padding=(0, 0, 0, 2),  # fits 80 columns
        pad_edge=False,
    )
    table.add_column("turn", no_wrap=True)
    for name in ("prompt", "local", "pulled", "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("TTFT off", justify="right", no_wrap=True)
    table.add_column("TTFT on", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("answers", no_wrap=True)
    for each in results:
        on = each.on
        counts = [f"{on.tokens(kind):,}" for kind in ("prompt", "local", "pulled", "recomputed")]
        table.add_row(
            each.turn.title,
            *counts,
            f"{each.off.ttft_s:.2f} s",
            f"[bold]{on.ttft_s:.2f} s[/]",
            f"{each.speedup:.1f}x",
            "[green]same[/]" if each.same else "[red]different[/]",
        )
    return table


def show_findings(console: Console, found: Sequence[Finding]) -> None:
    """One line each, with a mark."""
    for each in found:
        mark = "[green]✓[/]" if each.holds else ("[red]✗[/]" if each.required else "[yellow]![/]")
        console.print(f"{mark} {each.text}", highlight=False)
