"""What reuse saves per turn, ours and vLLM's own NixlConnector, in turn in one run.

Each system is a real 1P1D pair on this machine with a random-weights model, half
of the cores per engine.  In every round the pairs are started one after the other and
play the same conversations twice, without and with reuse of what the decode
engine holds.  They do not run side by side, because an idle pair may keep cores
busy with threads that poll.  A turn's *P leg* is the prefill engine's whole
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
from collections.abc import Iterator
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
from kvtransport_vllm.launch.engine import usable_cores

UPSTREAM = "NixlConnector"
Pair = tuple[Engine, Engine]
PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class System:
    """A kind of pair, and the seconds that its turns took without and with reuse."""

    name: str
    legs: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    turns: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    pulled: int = 0

    @property
    def upstream(self) -> bool:
        return self.name == UPSTREAM

    def converse(self, pair: Pair, script: Script, *, reuse: bool) -> list[list[int]]:
        """Play one conversation; the answers' tokens."""
        prefill, decode = pair
        salt = f"{script.seed}-{reuse}"  # the two runs share nothing
        history, answers = list(script.system), []
        held: dict[str, Any] = {}
        for number, question in enumerate(script.questions):
            history += question
            began = time.perf_counter()
            params = PREFILL | (held if self.upstream and reuse else {})
            if not self.upstream:
                params["kvt_reuse"] = reuse
            first = prefill.complete(
                history, max_tokens=1, kv_transfer_params=params, cache_salt=salt
            )
            leg = time.perf_counter() - began
            handoff = first["kv_transfer_params"]
            answer = decode.complete(
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


def start(name: str, model: Path, args: argparse.Namespace, stack: ExitStack) -> Pair:
    """Start a pair; ``stack`` ends it."""
    common = {"prefix_caching": args.prefix_cache == "on", "max_model_len": 16384}
    if name == UPSTREAM:
        engines = upstream_pair(model, args.logs, common)
    else:
        spec = PairSpec(
            model=model,
            logs=args.logs / name,
            backend=name,
            common=common,
            options={"decoder_kv_blocks_ttl": 480},
        )
        pair = EnginePair(spec)
        engines = pair.prefill, pair.decode
    for engine in engines:
        stack.callback(engine.start().stop)
    wait_ready(engines, timeout_s=400)
    for engine in engines:
        engine.warm_up()
    return engines


def upstream_pair(model: Path, logs: Path, common: dict[str, Any]) -> Pair:
    """VLLM's own connector with its bi-directional option, over UCX on this host."""
    ports = free_ports(4)
    engines = []
    # On the same cores as our pairs: threads of an unpinned engine fight for all of them.
    places = zip(("p", "d"), ports[:2], ports[2:], usable_cores(2), strict=True)
    for name, port, channel, cores in places:
        spec = EngineSpec(
            model=model,
            name=f"{UPSTREAM}-{name}",
            port=port,
            log=logs / f"{UPSTREAM}-{name}.log",
            cores=cores,
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


def play(
    system: System, model: Path, seeds: range, args: argparse.Namespace
) -> Iterator[tuple[int, list[list[int]]]]:
    """Start the system's pair and play; seed and answers of each conversation, as they end."""
    with ExitStack() as stack:
        pair = start(system.name, model, args, stack)
        # First contact is not what is compared.
        System(system.name).converse(pair, script(-1 - seeds.start, args), reuse=True)
        for seed in seeds:
            for reuse in (False, True):
                yield seed, system.converse(pair, script(seed, args), reuse=reuse)


def measure(systems: list[System], args: argparse.Namespace, console: Console) -> bool:
    """Play all conversations; whether all answers of one conversation are equal."""
    model = prepare_random_model(
        RandomModelSpec(layers=args.layers, hidden=args.hidden, max_position=16384)
    )
    first: dict[int, list[list[int]]] = {}
    same = True
    with Progress(console=console) as progress:
        total = 2 * args.rounds * len(systems) * args.conversations
        task = progress.add_task("conversations", total=total)
        for at in range(args.rounds):
            seeds = range(at * args.conversations, (at + 1) * args.conversations)
            # Neither always goes first.
            for system in systems if at % 2 == 0 else systems[::-1]:
                for seed, answers in play(system, model, seeds, args):
                    same &= answers == first.setdefault(seed, answers)
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
            ratios = [
                statistics.median(a / b for a, b in zip(x[True], y[True], strict=True))
                for x, y in ((mine.legs, other.legs), (mine.turns, other.turns))
            ]
            console.print(
                f"{mine.name} / {other.name} with reuse, turn by turn:"
                f" P leg {ratios[0]:.2f}, turn {ratios[1]:.2f}"
            )
    pulled = ", ".join(f"{s.name} {s.pulled}" for s in ours)
    console.print(f"pulled tokens: {pulled}; same answers everywhere: {'yes' if same else 'NO'}")


def main() -> int:
    """Run; 1 when answers differ or nothing was pulled."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--systems", nargs="+", default=["host", UPSTREAM], choices=["host", "cuda", UPSTREAM]
    )
    parser.add_argument("--prefix-cache", choices=["on", "off"], default="off")
    parser.add_argument("--rounds", type=int, default=4, help="starts of each pair")
    parser.add_argument("--conversations", type=int, default=2, help="in each round")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens per answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--logs", type=Path, default=Path("out/bench-turns"))
    parser.add_argument("--json", type=Path, help="also write the samples here")
    args = parser.parse_args()
    console = Console()
    systems = [System(name) for name in args.systems]
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
