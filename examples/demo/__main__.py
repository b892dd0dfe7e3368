"""A chat on two real vLLM engines whose KV travels both ways.

Starts a prefill engine, a decode engine and the router, holds the same
conversation without and with reuse, compares the answers, and writes a page.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import sys
from pathlib import Path

import httpx
import page
import smollm2
import stack
from chat import Chat
from rich.console import Console
from run import Prompts, Result, run
from terminal import show_findings, turns_table
from verdict import findings

from kvtransport_vllm.launch import ServiceError


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--backend", default="host", help="transport backend (host, cuda, ...)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for page, logs")
    parser.add_argument(
        "--prefix-cache",
        action="store_true",
        help="leave the prefill engine's own prefix cache on, in both conversations",
    )
    parser.add_argument(
        "--pip-args", type=shlex.split, default=(), help="arguments for the model's download"
    )
    return parser.parse_args()


def _converse(console: Console, url: str, prompts: Prompts) -> list[Result]:
    chat = Chat(url)
    results: list[Result] = []
    try:
        for result in run(chat, prompts):
            results.append(result)
            console.print(f"[bold]{result.turn.title}[/] [dim]{result.turn.question}[/]")
            console.print(
                f"  {result.on.text.strip()}\n"
                f"  [dim]first token after {result.off.ttft_s:.2f} s without reuse, "
                f"{result.on.ttft_s:.2f} s with; {result.on.tokens('pulled'):,} of "
                f"{result.on.tokens('prompt'):,} tokens pulled[/]",
                highlight=False,
            )
    finally:
        chat.close()
    return results


def _demo(console: Console, options: argparse.Namespace) -> int:
    model = smollm2.prepare(console, pip_arguments=tuple(options.pip_args))
    started = stack.running(
        console,
        model,
        backend=options.backend,
        prefix_caching=options.prefix_cache,
        logs=options.out,
    )
    with started as (pair, router):
        console.print()
        results = _converse(console, router.url, Prompts(pair.prefill))
        moved = {engine.name: engine.metrics() for engine in pair.engines}
    found = findings(results)
    console.print()
    console.print(turns_table(results))
    show_findings(console, found)
    written = options.out / "index.html"
    setting = page.Setting(options.backend, model.name, prefix_caching=options.prefix_cache)
    written.write_text(page.render(results, found, setting, moved))
    console.print(f"\npage: {written}   logs: {options.out}/*.log", highlight=False)
    return 0 if all(each.holds for each in found if each.required) else 1


def main() -> int:
    """Run the demo; 0 when all required findings hold, 1 when not, 2 when it could not run."""
    options = _arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # An orderly end by "kill" and from scripts that ignore SIGINT too: the context
    # managers stop what they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.log"):
        old.unlink()
    try:
        return _demo(console, options)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has ended")
        return 130
    except (ServiceError, smollm2.ModelError, httpx.HTTPError) as error:
        console.print(f"[red]the demo could not run:[/] {error}", highlight=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
