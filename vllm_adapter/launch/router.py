"""``kvt router`` in front of engines that this process started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvtransport_vllm.launch.engine import Engine
from kvtransport_vllm.launch.service import Service


def router_service(
    *,
    prefill: Sequence[Engine],
    decode: Sequence[Engine],
    port: int,
    log: Path,
    arguments: Sequence[str] = (),
) -> Service:
    """The router as a service that is not started yet.

    Engines go by their own names, which must be those under which their peers'
    configurations know them, as ``EnginePair`` does it.
    """
    engines = [("--prefill", each) for each in prefill] + [("--decode", each) for each in decode]
    command = [sys.executable, "-m", "kvtransport_vllm.router"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for option, engine in engines:
        command += [option, f"{engine.name}={engine.url}"]
    return Service("router", [*command, *arguments], port=port, log=log)
