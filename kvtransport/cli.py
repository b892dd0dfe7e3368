"""The command ``kvt``.

Subcommands live where their subject lives and are imported when they run, so
that ``kvt`` works without vLLM, drivers or the router's HTTP stack.  To add one,
add a line to ``COMMANDS``: a module and the name of its ``typer.Typer``.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvtransport.errors import KVTransportError


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Where a subcommand is and what to say when it cannot be imported."""

    target: str
    help: str
    install_hint: str = ""


COMMANDS = MappingProxyType(
    {
        "backends": Subcommand(
            "kvtransport.cli_backends:app", "List transfer backends and whether they can run here."
        ),
        "config": Subcommand(
            "kvtransport.cli_config:app", "Explain options and where their values come from."
        ),
        "status": Subcommand(
            "kvtransport.cli_status:app", "Show an engine's holdings, peers and calibration, live."
        ),
        "router": Subcommand(
            "kvtransport_vllm.router.cli:app",
            "Run the OpenAI-compatible router in front of prefill and decode engines.",
            "pip install 'kvtransport[router]'",
        ),
        "tenant": Subcommand("kvtransport_vllm.tenant_cli:app", "Print what quotas call a tenant."),
        "calibrate": Subcommand(
            "kvtransport_vllm.calibrate:app",
            "Measure a running pair: from how many tokens on does pulling pay?",
        ),
        "conformance": Subcommand(
            "kvtransport_conformance.cli:app",
            "Test a backend against the conformance suite.",
            "pip install 'kvtransport[conformance]'",
        ),
    }
)


def load(name: str, command: Subcommand) -> Any:
    """Import a subcommand's typer app; exits with the install hint when it is missing."""
    module, _, attribute = command.target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        hint = f"; install it with: {command.install_hint}" if command.install_hint else ""
        sys.exit(f"kvt {name} needs the module {error.name!r}, which is not installed{hint}")


def main() -> None:
    """Entry point of the console script."""
    from kvtransport.cli_root import build

    try:
        build(COMMANDS)()
    except KVTransportError as error:
        sys.exit(f"kvt: {error}")
