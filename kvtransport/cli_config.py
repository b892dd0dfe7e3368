"""``kvt config``: what an option is, and which place set its value."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtransport import registry
from kvtransport.config import Origin, environment_name, resolve
from kvtransport.errors import KVTransportError
from kvtransport.options import AgentOptions

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Explain options and where their values come from.",
)


@app.callback()
def config() -> None:
    """Explain options and where their values come from."""


@app.command()
def explain(
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Only this backend; repeatable.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="TOML file; else KVT_CONFIG names it.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show each option's value, the place that set it, its variable and its default."""
    kinds = _named(backend) if backend else _all()
    sections = {
        section: resolve(kind, section, file=file).origins for section, kind in kinds.items()
    }
    if as_json:
        typer.echo(msgspec.json.encode(_plain(sections)).decode())
        return
    for section, origins in sections.items():
        Console().print(_table(section, list(origins.values())))


def _named(backends: list[str]) -> dict[str, type[Any]]:
    return {f"backend.{name}": registry.find_backend(name).config for name in backends}


def _all() -> dict[str, type[Any]]:
    kinds: dict[str, type[Any]] = {"agent": AgentOptions}
    for name in sorted(registry.installed()):
        try:
            kinds |= _named([name])
        except KVTransportError as error:
            # One broken installation must not hide the options of the others.
            typer.echo(f"kvt: {error}", err=True)
    return kinds


def _plain(sections: dict[str, Any]) -> dict[str, dict[str, dict[str, str]]]:
    return {
        section: {
            name: {
                "value": origin.shown,
                "source": origin.source,
                "variable": environment_name(section, name),
            }
            for name, origin in origins.items()
        }
        for section, origins in sections.items()
    }


def _table(section: str, origins: list[Origin]) -> Table:
    table = Table(title=f"[{section}]".replace("[", r"\["), title_justify="left")
    for column in ("option", "value", "from", "default", "environment variable"):
        table.add_column(column, no_wrap=column in {"option", "environment variable"})
    for origin in origins:
        option = origin.option
        default = "required" if option.required else repr(option.default)
        about = f"\n[dim]{escape(option.help)}[/]" if option.help else ""
        style = "" if origin.source == "default" else "bold"
        table.add_row(
            option.name + about,
            escape("***" if option.secret else origin.shown),
            escape(origin.source),
            escape("***" if option.secret else default),
            environment_name(section, option.name),
            style=style,
        )
    return table
