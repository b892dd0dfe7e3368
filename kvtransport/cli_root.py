"""The root of ``kvt``; the only part of it that needs typer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated

import typer

from kvtransport.cli import Subcommand, load


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtransport {version('kvtransport')}")
        raise typer.Exit


def build(commands: Mapping[str, Subcommand]) -> typer.Typer:
    """Assemble the app; subcommands are imported when they run."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def root(
        *,
        _version: Annotated[
            bool,
            typer.Option("--version", callback=_show_version, is_eager=True, help="Show version."),
        ] = False,
    ) -> None:
        """Move KV cache between LLM engines."""

    for name, command in commands.items():
        _add(app, name, command)
    return app


def _add(app: typer.Typer, name: str, command: Subcommand) -> None:
    # Everything after the name, --help included, belongs to the subcommand.
    untouched = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=command.help, context_settings=untouched, add_help_option=False)
    def run(context: typer.Context) -> None:
        target = typer.main.get_command(load(name, command))
        target.main(args=list(context.args), prog_name=f"kvt {name}")
