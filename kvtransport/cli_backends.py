"""``kvt backends``: each installed backend, and whether it can run here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtransport import edge, registry
from kvtransport.config import backend_config
from kvtransport.errors import BackendUnavailableError, KVTransportError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One backend; ``reason`` and ``hint`` are empty when it is available."""

    name: str
    distribution: str
    summary: str
    wire: str
    available: bool
    reason: str
    hint: str
    details: dict[str, str]


def examine(name: str) -> Row:
    """Probe one backend; whatever goes wrong becomes its reason."""
    entries = registry.installed()[name]
    distribution = " and ".join(f"{e.distribution} {e.version}" for e in entries)
    summary = wire = ""
    try:
        info = registry.find_backend(name)
        summary, wire = info.summary, info.wire
        backend = registry.load_info(info)
        probe = edge.call(backend.probe, backend_config(info, None))
    except KVTransportError as error:
        hint = error.hint if isinstance(error, BackendUnavailableError) else ""
        reason = str(error).removesuffix(f". {hint}") if hint else str(error)
        return Row(name, distribution, summary, wire, available=False, reason=reason, hint=hint,
                   details={})  # fmt: skip
    details = {str(k): str(v) for k, v in probe.details.items()}
    hint = "" if probe.available else probe.hint or info.install_hint
    reason = "" if probe.available else probe.reason
    return Row(name, distribution, summary, wire, probe.available, reason, hint, details)


@app.callback(invoke_without_command=True)
def backends(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show probe details.")] = False,
) -> None:
    """List transfer backends, whether each can run here and, if not, what is missing."""
    rows = [examine(name) for name in sorted(registry.installed())]
    if as_json:
        typer.echo(msgspec.json.encode([asdict(row) for row in rows]).decode())
        return
    if not rows:
        typer.echo("No backend is installed.")
        return
    Console().print(_table(rows, verbose=verbose))


def _table(rows: list[Row], *, verbose: bool) -> Table:
    table = Table(title="Transfer backends", title_justify="left", expand=False)
    table.add_column("backend", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    table.add_column("about")
    table.add_column("from", no_wrap=True)
    for row in rows:
        about = [escape(row.summary)] if row.summary else []
        if row.reason:
            about.append(f"[red]{escape(row.reason)}[/]")
        if row.hint:
            about.append(f"[yellow]{escape(row.hint)}[/]")
        if verbose:
            about += [f"[dim]{escape(k)}: {escape(v)}[/]" for k, v in row.details.items()]
        answer = "[green]yes[/]" if row.available else "[red]no[/]"
        table.add_row(escape(row.name), answer, "\n".join(about), escape(row.distribution))
    return table
