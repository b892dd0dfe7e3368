"""The two commands that start processes: ``run`` and ``saboteurs``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvtransport.errors import ConfigError, KVTransportError
from kvtransport_conformance import progress
from kvtransport_conformance.context import Settings
from kvtransport_conformance.netns import Namespaces, filled
from kvtransport_conformance.plan import Plan, make_plan
from kvtransport_conformance.procs import split_prefix
from kvtransport_conformance.profiles import EXIT_CODES, SUITE_ERROR
from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.results import Waiver
from kvtransport_conformance.running import new_seed, run_all
from kvtransport_conformance.session import Options, Session
from kvtransport_conformance.statuses import Outcome
from kvtransport_conformance.target import find_target_reference


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for, parsed."""

    target: Mapping[str, Any]
    plan: Plan
    options: Options
    netns: bool


def run(
    backend: Annotated[str, typer.Option(help="A registered backend, or module:attribute.")] = "",
    target: Annotated[str, typer.Option(help="module:NAME or file.py:NAME of a Target.")] = "",
    config: Annotated[
        list[str] | None, typer.Option(help="Backend option as key=value, or a JSON object.")
    ] = None,
    peer_config: Annotated[
        list[str] | None, typer.Option(help="As --config, for the peer's side only.")
    ] = None,
    profile: Annotated[str, typer.Option(help="Profiles, separated by commas.")] = "",
    check: Annotated[str, typer.Option(help="Check ids, separated by commas.")] = "",
    report: Annotated[Path | None, typer.Option(help="Folder for the report files.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat an earlier run.")] = None,
    local_prefix: Annotated[str, typer.Option(help="Command that wraps the worker.")] = "",
    peer_prefix: Annotated[
        str, typer.Option(help="Command that wraps the peers: 'ip netns exec b', 'ssh node2'.")
    ] = "",
    peer_python: Annotated[str, typer.Option(help="Interpreter on the peer's side.")] = "",
    netns: Annotated[
        bool, typer.Option(help="Two network namespaces (root); {address} is filled in.")
    ] = False,
    soak_s: Annotated[float, typer.Option(min=0, help="Length of the soak check.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=100, help="Rounds of the long checks.")] = 10_000,
    max_mib: Annotated[int, typer.Option(min=2, help="Largest transfer.")] = 64,
    budget_s: Annotated[float, typer.Option(min=1, help="End of the whole run.")] = 900.0,
    start_s: Annotated[float, typer.Option(min=1, help="Limit for loading and opening.")] = 60.0,
    watchdog: Annotated[float, typer.Option(min=0.1, help="Multiplies every time limit.")] = 1.0,
    skip: Annotated[list[str] | None, typer.Option(help="ID=reason; repeatable.")] = None,
    waivers: Annotated[Path | None, typer.Option(help="JSON: {ID: {url, until}}.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every check.")] = False,
) -> None:
    """Run the suite against one backend, in two processes, and write a report."""
    console = Console(soft_wrap=False)
    try:
        options = Options(
            settings=Settings(soak_s=soak_s, rounds=rounds, max_bytes=max_mib << 20),
            local_prefix=split_prefix(local_prefix),
            peer_prefix=split_prefix(peer_prefix),
            peer_python=peer_python,
            budget_s=budget_s,
            start_s=start_s,
            watchdog_scale=watchdog,
            skips=_skips(skip or []),
            waivers=_waivers(waivers),
        )
        plan = make_plan(new_seed() if seed is None else seed, _words(profile), _words(check))
        wire = _target(backend, target, _options(config), _options(peer_config))
        outcome = _perform(Request(wire, plan, options, netns), report, console, verbose=verbose)
    except (KVTransportError, OSError, ValueError) as error:
        console.print(f"kvt conformance: {escape(str(error))}", highlight=False)
        raise typer.Exit(SUITE_ERROR) from error
    except Exception as error:
        # Python would exit with 1, which means that the backend failed.
        console.print_exception()
        raise typer.Exit(SUITE_ERROR) from error
    raise typer.Exit(outcome)


def _perform(request: Request, folder: Path | None, console: Console, *, verbose: bool) -> int:
    plan = request.plan
    console.print(f"{len(plan.checks)} checks, seed {plan.seed}", highlight=False)
    with (
        _placed(request) as (target, options),
        Session(target, plan, options) as session,
        progress.Live(console, len(plan.checks), verbose=verbose) as live,
    ):
        made = run_all(session, folder, live.begin, live.end)
    progress.summary(console, made)
    if folder is not None:
        console.print(f"report    {folder}", highlight=False)
    return EXIT_CODES[Outcome(made["result"])]


@contextmanager
def _placed(request: Request) -> Iterator[tuple[Mapping[str, Any], Options]]:
    """Put the two sides where they were asked to run."""
    if not request.netns:
        yield request.target, request.options
        return
    if "ref" in request.target:
        raise ConfigError("--netns works with --backend; a Target chooses its own addresses")
    with Namespaces() as spaces:
        config, peer = request.target["config"], request.target["peer_config"]
        target = {
            **request.target,
            "config": filled(config, spaces.local),
            "peer_config": filled({**config, **peer}, spaces.peer),
        }
        yield (
            target,
            replace(
                request.options,
                local_prefix=spaces.local.prefix,
                peer_prefix=spaces.peer.prefix,
                network=spaces.fault,
            ),
        )


def _target(
    backend: str, target: str, config: dict[str, Any], peer_config: dict[str, Any]
) -> dict[str, Any]:
    if bool(backend) == bool(target):
        raise ConfigError("name what to test: --backend NAME or --target module:NAME")
    reference = target or find_target_reference(backend)
    if reference:
        return {"ref": reference, "config": config, "peer_config": peer_config}
    return {"backend": backend, "config": config, "peer_config": peer_config}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _options(texts: list[str] | None) -> dict[str, Any]:
    """Parse key=value pairs and JSON objects; values are JSON where they parse as it."""
    found: dict[str, Any] = {}
    for text in texts or []:
        if text.lstrip().startswith("{"):
            found.update(json.loads(text))
            continue
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"option {text!r} must be key=value or a JSON object")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _skips(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        key, _, reason = text.partition("=")
        if not reason:
            raise ConfigError(f"--skip {text!r} needs a reason: ID=reason")
        found[key] = reason
    _require_known(found, "--skip")
    return found


def _waivers(path: Path | None) -> dict[str, Waiver]:
    if path is None:
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    try:
        found = {key: Waiver(e["url"], date.fromisoformat(e["until"])) for key, e in raw.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: each waiver needs url and until (a date): {error}") from error
    _require_known(found, str(path))
    return found


def _require_known(ids: Mapping[str, Any], where: str) -> None:
    unknown = sorted(set(ids) - set(all_checks()))
    if unknown:
        raise ConfigError(f"{where} names checks that do not exist: {', '.join(unknown)}")


def saboteurs(
    full: Annotated[
        bool, typer.Option(help="Every check against every saboteur: about 100 minutes.")
    ] = False,
    only: Annotated[str, typer.Option(help="Names, separated by commas.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Order and data.")] = 1,
) -> None:
    """Show that broken backends are caught, each by exactly the checks it names."""
    from kvtransport_conformance.saboteurs.campaign import campaign

    console = Console()
    try:
        sound = campaign(console, names=_words(only), seed=seed, full=full)
    except KVTransportError as error:
        console.print(f"kvt conformance: {escape(str(error))}", highlight=False)
        raise typer.Exit(SUITE_ERROR) from error
    raise typer.Exit(0 if sound else 1)
