"""``kvt status``: one engine's ledger, peers and calibration in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from kvtransport.lease.security import load_secret
from kvtransport.lease.status import StatusClient

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    address: Annotated[str, typer.Argument(help="Control address, tcp://host:port.")],
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds.")] = 1.0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds.")] = 3.0,
    secret_file: Annotated[
        str, typer.Option(help="Cluster secret; default: KVT_CLUSTER_SECRET, if set.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what an engine holds, whom it knows and what it has learned."""
    console = Console()
    with StatusClient(address, load_secret(secret_file)) as client:
        first = client.fetch(timeout_s)
        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(first), indent=2).decode())
        elif not watch:
            console.print(page(first))
        else:
            _watch(client, first, interval_s, timeout_s, console)


def _watch(
    client: StatusClient,
    current: Mapping[str, Any],
    interval_s: float,
    timeout_s: float,
    console: Console,
) -> None:
    with Live(page(current), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                live.update(page(client.fetch(timeout_s)), refresh=True)
        except KeyboardInterrupt:
            return


def page(status: Mapping[str, Any]) -> Group:
    """Everything on one screen."""
    head = Table.grid(padding=(0, 2))
    head.add_row("engine", f"{status['engine_id']}  (incarnation {status['incarnation']})")
    head.add_row(
        "control", f"{status['address']}  {'encrypted' if status['encrypted'] else 'loopback only'}"
    )
    return Group(
        Panel(head, title="kvtransport", title_align="left"),
        _ledger(status["ledger"]),
        _peers(status["peers"]),
        _learned(status.get("recompute", {}), status["ledger"].get("retention", {})),
    )


def _ledger(ledger: Mapping[str, Any]) -> Panel:
    budget, used = ledger["budget_blocks"], ledger["retained_blocks"]
    grid = Table.grid(padding=(0, 2))
    share = f" ({100 * used / budget:.0f} % of the budget of {budget})" if budget else ""
    grid.add_row("retained", f"{ledger['retained']} conversations, {used} blocks{share}")
    grid.add_row("", f"{ledger['retained_nbytes'] / 2**20:.1f} MiB of KV")
    grid.add_row("handoffs", str(ledger["handoffs"]))
    grid.add_row("leases", str(ledger["leases"]))
    events = [f"{k} {v}" for k, v in sorted(ledger["counters"].items())]
    grid.add_row("since start", ", ".join(events) or "nothing yet")
    return Panel(grid, title="ledger", title_align="left")


def _peers(peers: list[Mapping[str, Any]]) -> Panel:
    table = Table(box=None, pad_edge=False)
    for column in ("peer", "state", "engine", "round trip", "why"):
        table.add_column(column)
    for peer in peers:
        trip = peer["rtt_s"]
        table.add_row(
            peer["name"],
            peer["state"],
            peer["engine_id"],
            "" if trip is None else f"{trip * 1e3:.2f} ms",
            peer["reason"],
        )
    return Panel(table, title="peers", title_align="left")


def _learned(recompute: Mapping[str, Any], retention: Mapping[str, Any]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    for title, values in (("recompute", recompute), ("retention", retention)):
        for name, value in values.items():
            grid.add_row(title, name, _shown(value))
            title = ""  # noqa: PLW2901  # named once per group
    return Panel(grid, title="policies", title_align="left")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
