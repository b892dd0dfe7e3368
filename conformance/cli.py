"""``kvt conformance``: run, list, explain, diff, matrix, verify, saboteurs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvtransport.errors import ConfigError, KVTransportError
from kvtransport_conformance import cli_run, diff, matrix, verify
from kvtransport_conformance.profiles import PROFILES, SUITE_ERROR
from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.report import load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Test a backend against the conformance suite.\n\n"
    "Exit codes: 0 success, 1 failure, 2 partial, 3 not verified, 4 the suite could not run.",
)
app.command(name="run")(cli_run.run)
app.command(name="saboteurs")(cli_run.saboteurs)

OUT = Console()
ERR = Console(stderr=True)


def fail(error: Exception | str) -> typer.Exit:
    """Print what is wrong with the request; the exception to raise."""
    ERR.print(f"kvt conformance: {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(SUITE_ERROR)


@app.command(name="list")
def list_checks(
    profile: Annotated[str, typer.Option(help="Only this profile's checks.")] = "",
) -> None:
    """List the checks: id, level, profiles, name."""
    if profile and profile not in PROFILES:
        raise fail(f"no profile {profile!r}; known: {', '.join(PROFILES)}")
    for entry in all_checks().values():
        if profile and profile not in entry.profiles:
            continue
        level = entry.profiles.get(profile, entry.level)
        names = ",".join(name.removeprefix("KVT-") for name in entry.profiles)
        OUT.print(f"{entry.id:<7} {level:<9} {names:<26} {entry.name}", highlight=False)


@app.command()
def explain(check_id: Annotated[str, typer.Argument(help="For example CMP-06.")]) -> None:
    """Say what a check demands, why it exists and what it needs."""
    entry = all_checks().get(check_id.upper())
    if entry is None:
        raise fail(f"no check {check_id!r}; 'kvt conformance list' shows all")
    levels = ", ".join(f"{level} in {name}" for name, level in entry.profiles.items())
    needs = ", ".join(entry.needs) or "nothing declared"
    lines = [f"{entry.id} {entry.name}", "", f"  {entry.text}", ""]
    lines += [f"  level     {levels}", f"  needs     {needs}"]
    lines += [f"  since     suite {entry.since}, revision {entry.revision}"]
    lines += [f"  limit     {entry.timeout_s:g} s, then it counts as TIMEOUT"]
    lines += [f"  why       {entry.why}"] if entry.why else []
    OUT.print("\n".join(lines), highlight=False, markup=False)


@app.command(name="diff")
def diff_reports(before: Path, after: Path) -> None:
    """Compare two reports; exits 1 when a check regressed."""
    try:
        changes = diff.compare(load(before), load(after))
    except (OSError, ValueError, KeyError) as error:
        raise fail(f"cannot compare: {error}") from error
    for change in changes:
        OUT.print(
            f"{change.check:<7} {change.before:<14} -> {change.after:<14} {change.verdict}",
            highlight=False,
        )
    if not changes:
        OUT.print("no difference")
    raise typer.Exit(1 if diff.regressed(changes) else 0)


@app.command(name="verify")
def verify_reports(
    reports: Annotated[list[Path], typer.Argument(help="report.json files")],
) -> None:
    """Recompute plan, digests and totals; exits 1 for an edited or incomplete report.

    Tamper-evident, not tamper-proof: who edits a report and recomputes its digest
    passes.  To be sure, run the suite.
    """
    bad = False
    for path in reports:
        try:
            report = load(path)
            found = verify.problems(report)
        except (OSError, ValueError) as error:
            found, report = [str(error)], {}
        except ModuleNotFoundError as error:
            raise fail(f"needs {error.name}: pip install 'kvtransport[conformance]'") from error
        bad |= bool(found)
        OUT.print(f"{path}: {'NOT SOUND' if found else 'sound'}", highlight=False, soft_wrap=True)
        for text in found or verify.notes(report):
            OUT.print(f"  {escape(text)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


@app.command(name="matrix")
def make_matrix(
    reports: Annotated[
        list[Path] | None, typer.Argument(help="Report files or folders of them.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare with this file's table; exit 1 if it differs.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Replace the table in this file.")] = None,
) -> None:
    """Make the support table from stored reports."""
    try:
        table = matrix.render(matrix.find_reports(reports or [default_reports()]))
        if check is None and write is None:
            typer.echo(table, nl=False)
        for path in filter(None, (check, write)):
            old = path.read_text(encoding="utf-8")
            new = matrix.replace_in(old, table)
            if path is write:
                path.write_text(new, encoding="utf-8")
            elif new != old:
                ERR.print(f"{path}: the table is not what the reports give; run with --write")
                raise typer.Exit(1)
    except (KVTransportError, OSError, ValueError, KeyError) as error:
        raise fail(error) from error


def default_reports() -> Path:
    """The folder of stored reports that comes with the package."""
    folder = Path(__file__).parent / "reports"
    if not folder.is_dir():
        raise ConfigError("this installation holds no reports; name some")
    return folder
