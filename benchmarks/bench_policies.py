"""Recompute policies x retention policies on real vLLM pairs under multi-turn load.

Conversations with a system prompt of their own, growing history and think times
between turns run concurrently against a 1P1D pair per combination.  The pairs
of a group run side by side and are played one after the other, in another
order each time, all with the same conversations: what else the machine does
hits all of them.  Prints TTFT, TPOT, throughput, pulled tokens, retained bytes
and preemptions, and compares the cost model with the best fixed threshold;
writes the samples, a chart and a page.

``python benchmarks/bench_policies.py`` takes under 25 minutes on 2 cores;
``--quick`` runs few combinations.  ``--pressure`` takes caches so small that
requests are preempted, and asks whether retention makes a difference to that.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy_load import Load, Run, play, warm_up
from policy_report import Row, console, policy_verdicts, pressure_verdicts, show, write
from rich.progress import Progress

from kvtransport_vllm.launch import EnginePair, PairSpec, RandomModelSpec, prepare_random_model

FIXED = (0, 64, 512, 2048)

# Pairs side by side; each takes about 4 GiB of memory, and no CPU while another is played.
TOGETHER = 3


@dataclass(frozen=True)
class Combination:
    """One row: a recompute policy of the prefill engine and a retention policy."""

    recompute: str
    retention: str
    threshold: int = 64

    @property
    def name(self) -> str:
        policy = f"threshold {self.threshold}" if self.recompute == "threshold" else self.recompute
        return f"{policy} {self.retention}"

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "-")

    def options(self, role: str, folder: Path) -> dict[str, Any]:
        """The connector's settings of one engine of this row."""
        options: dict[str, Any] = {"recompute": self.recompute, "retention": self.retention}
        if self.recompute == "never_pull" and role == "decode":
            # Without reuse a pair still hands prompts over: the policy is about
            # what goes back.  Otherwise every prompt would be computed twice.
            options["recompute"] = "always_pull"
        elif self.recompute != "never_pull":
            options["kv_recompute_threshold"] = self.threshold
        if self.recompute == "cost_model":
            # One file per engine: what a prefill engine learns is not true for the other.
            state = folder / f"calibration-{role}.json"
            state.unlink(missing_ok=True)
            options["recompute_config"] = {"state_file": str(state)}
        return options


def plan(args: argparse.Namespace) -> list[list[Combination]]:
    """What is measured, in groups that run side by side.

    Nearest rivals first and together; the fixed thresholds have the budgeted retention.
    """
    if args.pressure:
        rows = [Combination("threshold", kept) for kept in ("off", "ttl", "budgeted")]
    else:
        near, far = FIXED[:2], () if args.quick else FIXED[2:]
        rows = [Combination("threshold", "budgeted", tokens) for tokens in near]
        rows.append(Combination("cost_model", "budgeted"))
        rows += [Combination("threshold", "budgeted", tokens) for tokens in far]
        rows.append(Combination("never_pull", "off"))
    if not (args.pressure or args.quick):
        rows += [Combination("never_pull", kept) for kept in ("ttl", "budgeted")]
        rows += [Combination("threshold", kept) for kept in ("off", "ttl")]
        rows += [Combination("cost_model", kept) for kept in ("off", "ttl")]
    return [rows[at : at + TOGETHER] for at in range(0, len(rows), TOGETHER)]


def start(
    group: Sequence[Combination], model: Path, args: argparse.Namespace, stack: ExitStack
) -> dict[str, EnginePair]:
    """One pair per combination, by its name; ``stack`` ends them."""
    common = {
        "max_model_len": 2048 if args.pressure else 16384,
        "prefix_caching": False,
        "arguments": ("--num-gpu-blocks-override", str(args.blocks)),
    }
    pairs = {}
    for combination in group:
        folder = args.out / "logs" / combination.folder
        folder.mkdir(parents=True, exist_ok=True)
        spec = PairSpec(
            model=model,
            logs=folder,
            common=common,
            prefill_options=combination.options("prefill", folder),
            decode_options=combination.options("decode", folder),
        )
        pairs[combination.name] = stack.enter_context(EnginePair(spec)).start()
    return pairs


def measure(
    group: Sequence[Combination], load: Load, model: Path, args: argparse.Namespace
) -> Iterator[Run]:
    """The group's runs as they end."""
    order = random.Random(args.seed)
    with ExitStack() as stack:
        pairs = start(group, model, args, stack)
        for pair in pairs.values():
            warm_up(pair, load, args.warm_up)
        for repeat in range(args.repeat):
            names = list(pairs)
            order.shuffle(names)
            for name in names:
                yield play(pairs[name], load, Run(name, repeat))


def parse() -> argparse.Namespace:
    """The command line; what is not given depends on the mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="three combinations only")
    parser.add_argument("--pressure", action="store_true", help="caches too small for the load")
    parser.add_argument("--repeat", type=int, help="runs of each combination")
    parser.add_argument("--conversations", type=int, help="in each run")
    parser.add_argument("--turns", type=int, help="of each conversation")
    parser.add_argument("--system", type=int, help="longest system prompt, tokens")
    parser.add_argument("--question", type=int, default=40, help="tokens, on average")
    parser.add_argument("--answer", type=int, help="tokens")
    parser.add_argument("--think", type=float, help="mean think time, seconds")
    parser.add_argument("--concurrency", type=int, help="conversations at once")
    parser.add_argument("--warm-up", type=int, default=3, help="conversations not counted")
    parser.add_argument("--blocks", type=int, help="KV cache of each engine, 32 tokens each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the runs")
    parser.add_argument("--out", type=Path, default=Path("out/bench-policies"))
    args = parser.parse_args()
    usual = {"repeat": 2, "conversations": 10, "turns": 4, "system": 2000, "answer": 24,
             "think": 1.0, "concurrency": 3, "blocks": 1536}  # fmt: skip
    if args.pressure:
        # Many short runs: the machine's mood changes, and is to hit all alike.
        usual = {"repeat": 4, "conversations": 16, "turns": 3, "system": 800, "answer": 96,
                 "think": 0.2, "concurrency": 8, "blocks": 96}  # fmt: skip
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    """Run all; 1 when a request was refused or failed."""
    args = parse()
    args.out = args.out.resolve()  # engines have folders of their own
    args.out.mkdir(parents=True, exist_ok=True)
    load = Load(args.conversations, args.turns, args.system, args.question, args.answer,
                args.think, args.concurrency)  # fmt: skip
    model = prepare_random_model(
        RandomModelSpec(layers=args.layers, hidden=args.hidden, max_position=16384)
    )
    conditions = (
        f"{args.layers} x {args.hidden} random model on CPU, one core per engine, P's prefix cache"
        f" off; {args.repeat} runs of {args.conversations} conversations of {args.turns} turns,"
        f" {args.concurrency} at once, {args.answer} tokens per answer, {args.think:g} s to think,"
        f" {args.blocks} blocks of 32 tokens per engine"
    )
    verdicts = pressure_verdicts if args.pressure else policy_verdicts
    stem = args.out / ("pressure" if args.pressure else "policies")
    groups = plan(args)
    rows = {one.name: Row(one.name) for group in groups for one in group}
    out = console()
    with Progress(console=out) as progress:
        task = progress.add_task("runs", total=args.repeat * len(rows))
        for group in groups:
            for run in measure(group, load, model, args):
                rows[run.name].runs.append(run)
                measured = [row for row in rows.values() if row.runs]
                write(measured, verdicts(measured), stem, conditions)
                progress.advance(task)
    show(list(rows.values()), verdicts(list(rows.values())), out)
    out.print(f"{conditions}; {stem}.json, .png, .html", soft_wrap=True, highlight=False)
    return 1 if any(row.refused or row.failed for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
