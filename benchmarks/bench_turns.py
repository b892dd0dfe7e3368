"""What reuse saves per turn, ours and vLLM's own NixlConnector, in turn in one run.

Each system is a real 1P1D pair on this machine with a random-weights model.
For every conversation each system plays the same turns twice, without and with
reuse of what the decode engine holds, the systems one after the other, so that
a busy machine slows all alike.  A turn's *P leg* is the prefill engine's whole
answer time; time to first token adds the decode engine's first token, which
only we can measure apart: upstream's handle comes with non-streamed answers.

``python benchmarks/bench_turns.py --prefix-cache off``
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransport_vllm.launch import (
    Engine,
    EnginePair,
    EngineSpec,
    PairSpec,
    RandomModelSpec,
    free_ports,
    prepare_random_model,
    wait_ready,
)

UPSTREAM = "NixlConnector"
PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class System:
    """A pair and how its turns are driven."""

    name: str
    prefill: Engine
    decode: Engine
    upstream: bool
    legs: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    turns: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    pulled: int = 0

    def converse(self, script: Script, *, reuse: bool) -> list[list[int]]:
        """Play one conversation; the answers' tokens."""
        salt = f"{script.seed}-{reuse}"  # the two runs share nothing
        history, answers = list(script.system), []
        held: dict[str, Any] = {}
        for number, question in enumerate(script.questions):
            history += question
            began = time.perf_counter()
            params = PREFILL | (held if self.upstream and reuse else {})
            if not self.upstream:
                params["kvt_reuse"] = reuse
            first = self.prefill.complete(
                history, max_tokens=1, kv_transfer_params=params, cache_salt=salt
            )
            leg = time.perf_counter() - began
            handoff = first["kv_transfer_params"]
            answer = self.decode.complete(
                history,
                max_tokens=script.answer_tokens,
                kv_transfer_params=handoff,
                cache_salt=salt,
            )
            held = answer.get("kv_transfer_params") or {}
            tokens = answer["choices"][0]["token_ids"]
            answers.append(tokens)
            history += tokens
            if number:
                self.legs[reuse].append(leg)
                self.turns[reuse].append(time.perf_counter() - began)
                self.pulled += handoff.get("kvt_turn", {}).get("pulled_tokens", 0)
        return answers


@dataclass(frozen=True)
class Script:
    """What a user says: a long system prompt and one question per turn."""

    seed: int
    system: list[int]
    questions: list[list[int]]
    answer_tokens: int


def script(seed: int, args: argparse.Namespace) -> Script:
    """Make the conversation of one seed."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randint(0x20, 0x7E) for _ in range(length)]

    questions = [text(60) for _ in range(args.turns)]
    return Script(seed, text(args.prompt), questions, args.answer)


def start(args: argparse.Namespace, stack: ExitStack, logs: Path) -> list[System]:
    """Start the pairs side by side; ``stack`` ends them."""
    model = prepare_random_model(
        RandomModelSpec(layers=args.layers, hidden=args.hidden, max_position=16384)
    )
    common = {"prefix_caching": args.prefix_cache == "on", "max_model_len": 16384}
    systems = []
    for name in args.systems:
        if name == UPSTREAM:
            prefill, decode = upstream_pair(model, logs, common)
        else:
            spec = PairSpec(
                model=model,
                logs=logs / name,
                backend=name,
                common=common,
                options={"decoder_kv_blocks_ttl": 480},
            )
            pair = EnginePair(spec)
            prefill, decode = pair.prefill, pair.decode
        for engine in (prefill, decode):
            stack.callback(engine.start().stop)
        wait_ready((prefill, decode), timeout_s=400)
        for engine in (prefill, decode):
            engine.warm_up()
        systems.append(System(name, prefill, decode, upstream=name == UPSTREAM))
    return systems


def upstream_pair(model: Path, logs: Path, common: dict[str, Any]) -> tuple[Engine, Engine]:
    """VLLM's own connector with its bi-directional option, over UCX on this host."""
    ports = free_ports(4)
    engines = []
    for name, port, channel in (("p", ports[0], ports[2]), ("d", ports[1], ports[3])):
        spec = EngineSpec(
            model=model,
            name=f"{UPSTREAM}-{name}",
            port=port,
            log=logs / f"{UPSTREAM}-{name}.log",
            connector={
                "kv_connector": UPSTREAM,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
            },
            env={
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
                "UCX_TLS": "tcp,self,sm",
            },
            **common,
        )
        engines.append(Engine(spec))
    return engines[0], engines[1]


def measure(systems: list[System], args: argparse.Namespace, console: Console) -> bool:
    """Play all conversations; whether all answers of one conversation are equal."""
    same = True
    with Progress(console=console) as progress:
        task = progress.add_task("conversations", total=args.conversations)
        for seed in range(args.conversations):
            played = script(seed, args)
            answers = [s.converse(played, reuse=r) for s in systems for r in (False, True)]
            same &= all(a == answers[0] for a in answers)
            progress.advance(task)
    return same


def report(systems: list[System], args: argparse.Namespace, console: Console, same: bool) -> None:
    """Print the medians and, turn by turn, ours over upstream's."""
    table = Table(
        title=f"turns 2 to {args.turns}, medians in ms; {args.layers} x {args.hidden} model, "
        f"{args.prompt} tokens first, prefix cache {args.prefix_cache}"
    )
    for column in ("system", "P leg off", "P leg on", "off/on", "turn off", "turn on", "off/on"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system in systems:
        row = [system.name]
        for values in (system.legs, system.turns):
            off, on = (1000 * statistics.median(values[reuse]) for reuse in (False, True))
            row += [f"{off:.0f}", f"{on:.0f}", f"{off / on:.2f}x"]
        table.add_row(*row)
    console.print(table)
    ours = [s for s in systems if not s.upstream]
    for other in (s for s in systems if s.upstream):
        for mine in ours:
            legs = statistics.median(
                a / b for a, b in zip(mine.legs[True], other.legs[True], strict=True)
            )
            console.print(f"{mine.name} / {other.name}, P leg with reuse, turn by turn: {legs:.2f}")
    pulled = ", ".join(f"{s.name} {s.pulled}" for s in ours)
    console.print(f"pulled tokens: {pulled}; same answers everywhere: {'yes' if same else 'NO'}")


def main() -> int:
    """Run; 1 when answers differ or nothing was pulled."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--systems", nargs="+", default=["host", UPSTREAM], choices=["host", "cuda", UPSTREAM]
    )
    parser.add_argument("--prefix-cache", choices=["on", "off"], default="off")
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens per answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--logs", type=Path, default=Path("out/bench-turns"))
    parser.add_argument("--json", type=Path, help="also write the samples here")
    args = parser.parse_args()
    console = Console()
    with ExitStack() as stack:
        systems = start(args, stack, args.logs)
        same = measure(systems, args, console)
    report(systems, args, console, same)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    s.name: {
                        "legs": {str(k): v for k, v in s.legs.items()},
                        "turns": {str(k): v for k, v in s.turns.items()},
                    }
                    for s in systems
                },
                indent=1,
            )
        )
    return 0 if same and all(s.pulled for s in systems if not s.upstream) else 1


if __name__ == "__main__":
    sys.exit(main())
