"""Recompute policies x retention policies on a real vLLM pair under multi-turn load.

Conversations with a system prompt of their own, growing history and think times
between turns run concurrently against a 1P1D pair, which is started anew for
each combination; all get the same conversations.  Prints TTFT, TPOT, throughput,
pulled tokens, retained bytes and preemptions, and writes a chart and a page.

``python benchmarks/bench_policies.py`` (about 25 minutes on 2 cores; ``--quick``
runs few combinations.)
"""

from __future__ import annotations

import argparse
import base64
import html
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransport_vllm.launch import (
    Engine,
    EnginePair,
    PairSpec,
    RandomModelSpec,
    prepare_random_model,
)

PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
FIXED = (0, 64, 512, 2048)


@dataclass(frozen=True)
class Combination:
    """One row: a recompute policy and a retention policy."""

    recompute: str
    retention: str
    threshold: int = 64

    @property
    def name(self) -> str:
        policy = f"threshold {self.threshold}" if self.recompute == "threshold" else self.recompute
        return f"{policy} / {self.retention}"

    def options(self, state: Path) -> dict[str, Any]:
        """The connector's settings of this row."""
        options: dict[str, Any] = {"recompute": self.recompute, "retention": self.retention}
        if self.recompute != "never_pull":
            options["kv_recompute_threshold"] = self.threshold
        if self.recompute == "cost_model":
            options["recompute_config"] = {"state_file": str(state)}
        return options


@dataclass
class Result:
    """What one combination measured; times in seconds."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    pulled: int = 0
    retained: list[float] = field(default_factory=list)
    preemptions: float = 0.0
    failed: int = 0

    def quantile(self, percent: int) -> float:
        """TTFT percentile, nearest rank."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass(frozen=True)
class Load:
    """The same conversations for every combination."""

    conversations: int
    turns: int
    system: int
    question: int
    answer: int
    think_s: float
    concurrency: int

    def script(self, seed: int) -> tuple[list[int], list[list[int]], list[float]]:
        """System prompt, questions and think times of one conversation."""
        rng = random.Random(seed)

        def text(length: int) -> list[int]:
            return [rng.randint(0x20, 0x7E) for _ in range(length)]

        # Prompts of very different lengths: no single threshold is right for all.
        system = text(rng.choice((self.system // 8, self.system // 2, self.system)))
        questions = [text(rng.randint(1, 2 * self.question)) for _ in range(self.turns)]
        return system, questions, [rng.expovariate(1 / self.think_s) for _ in range(self.turns)]


def stream(engine: Engine, body: dict[str, Any]) -> Iterator[list[int]]:
    """Token ids as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=300)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise OSError(response.read()[:300])
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice.get("token_ids"):
                        yield choice["token_ids"]
    finally:
        connection.close()


def converse(pair: EnginePair, load: Load, seed: int, result: Result, lock: Any) -> None:
    """Play one conversation as a router would and a user who thinks between turns."""
    history, questions, thoughts = load.script(seed)
    for question, thought in zip(questions, thoughts, strict=True):
        history = history + question
        began = time.perf_counter()
        try:
            first = pair.prefill.complete(history, max_tokens=1, kv_transfer_params=PREFILL)
            handoff = first["kv_transfer_params"]
            body = {"model": "model", "prompt": history, "max_tokens": load.answer,
                    "temperature": 0, "stream": True, "return_token_ids": True,
                    "kv_transfer_params": handoff}  # fmt: skip
            answer: list[int] = []
            times = []
            for tokens in stream(pair.decode, body):
                answer += tokens
                times.append(time.perf_counter())
        except OSError:
            with lock:
                result.failed += 1
            return
        with lock:
            result.ttft_s.append(times[0] - began)
            if len(answer) > 1:
                result.tpot_s.append((times[-1] - times[0]) / (len(answer) - 1))
            result.tokens += len(answer)
            result.pulled += handoff["kvt_turn"]["pulled_tokens"]
        history = history + answer
        time.sleep(thought)


def run(combination: Combination, load: Load, model: Path, args: argparse.Namespace) -> Result:
    """Start a pair, warm it up with a few conversations, measure the others."""
    spec = PairSpec(
        model=model,
        logs=args.out / "logs",
        options=combination.options(args.out / "calibration.json"),
        common={"max_model_len": 16384, "prefix_caching": False},
    )
    result = Result(combination.name)
    lock = threading.Lock()
    with EnginePair(spec) as pair:
        pair.start()
        warm = Result("warm-up")
        for seed in range(10_000, 10_000 + args.warm_up):
            converse(pair, load, seed, warm, lock)
        before = _preemptions(pair)
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(pair.decode, result, stop))
        sampler.start()
        began = time.perf_counter()
        with ThreadPoolExecutor(load.concurrency) as pool:
            seeds = range(load.conversations)
            list(pool.map(lambda seed: converse(pair, load, seed, result, lock), seeds))
        result.seconds = time.perf_counter() - began
        stop.set()
        sampler.join()
        result.preemptions = _preemptions(pair) - before
    return result


def _sample(decode: Engine, result: Result, stop: threading.Event) -> None:
    while not stop.wait(0.5):
        result.retained.append(decode.counter("kvtransport_retained_bytes"))


def _preemptions(pair: EnginePair) -> float:
    return sum(engine.counter("vllm:num_preemptions_total") for engine in pair.engines)


def show(results: list[Result], console: Console) -> None:
    """Print the table, and how the cost model compares with the best fixed threshold."""
    table = Table(title="TTFT and TPOT in ms, retained KV in MiB")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy / retention" else "right")
    for result in results:
        table.add_row(*cells(result))
    console.print(table)
    fixed = [r for r in results if r.name.startswith("threshold") and "/ budgeted" in r.name]
    models = [r for r in results if r.name == "cost_model / budgeted"]
    for model in models if fixed else []:
        for percent in (50, 95):
            best = min(fixed, key=lambda r: r.quantile(percent))
            ratio = model.quantile(percent) / best.quantile(percent)
            console.print(
                f"p{percent}: cost_model / best fixed threshold ({best.name}) = {ratio:.2f}"
            )


COLUMNS = (
    "policy / retention", "p50", "p95", "p99", "TPOT", "tok/s", "pulled", "kept mean", "kept peak",
    "preempted", "failed",
)  # fmt: skip


def cells(result: Result) -> list[str]:
    """One row as text."""
    kept = result.retained or [0.0]
    return [
        result.name,
        *(f"{1e3 * result.quantile(p):.0f}" for p in (50, 95, 99)),
        f"{1e3 * statistics.median(result.tpot_s):.1f}",
        f"{result.tokens / result.seconds:.1f}",
        str(result.pulled),
        f"{statistics.mean(kept) / 2**20:.1f}",
        f"{max(kept) / 2**20:.1f}",
        f"{result.preemptions:.0f}",
        str(result.failed),
    ]


def write_page(results: list[Result], folder: Path, subtitle: str) -> None:
    """``policies.png`` and ``policies.html`` beside it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.45 * len(results) + 1.5), layout="constrained")
    for offset, (percent, color) in enumerate(((50, "#2563eb"), (95, "#93c5fd"))):
        places = [index + 0.38 * offset for index in range(len(results))]
        widths = [1e3 * result.quantile(percent) for result in results]
        axes.barh(places, widths, height=0.36, color=color, label=f"p{percent}")
    axes.set_yticks([i + 0.19 for i in range(len(results))], [r.name for r in results])
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, ms")
    axes.set_title(subtitle, fontsize=9)
    axes.legend()
    png = folder / "policies.png"
    figure.savefig(png, dpi=150)
    image = base64.b64encode(png.read_bytes()).decode()
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(result)) + "</tr>"
        for result in results
    )
    page = f"""<!doctype html><meta charset="utf-8"><title>kvtransport: policies</title>
<style>body{{font:15px system-ui;margin:2rem auto;max-width:60rem}}td,th{{padding:.3rem .7rem;
text-align:right;border-bottom:1px solid #ddd}}td:first-child,th:first-child{{text-align:left}}
img{{max-width:100%}}</style><h1>Recompute and retention policies</h1><p>{html.escape(subtitle)}
</p><img alt="time to first token by policy" src="data:image/png;base64,{image}">
<table><tr>{head}</tr>{rows}</table>"""
    (folder / "policies.html").write_text(page)


def combinations(*, quick: bool) -> list[Combination]:
    """What is measured; fixed thresholds with the budgeted retention."""
    rows = [Combination("threshold", "budgeted", t) for t in ((64,) if quick else FIXED)]
    rows += [Combination("cost_model", "budgeted"), Combination("never_pull", "off")]
    if not quick:
        rows += [Combination("never_pull", kept) for kept in ("ttl", "budgeted")]
        rows += [Combination("threshold", kept) for kept in ("off", "ttl")]
        rows += [Combination("cost_model", kept) for kept in ("off", "ttl")]
    return rows


def main() -> int:
    """Run all; 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="three combinations only")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system", type=int, default=2000, help="longest system prompt, tokens")
    parser.add_argument("--question", type=int, default=40)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--think", type=float, default=1.0, help="mean think time, seconds")
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3, help="conversations not counted")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("out/bench-policies"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "calibration.json").unlink(missing_ok=True)
    console = Console()
    load = Load(args.conversations, args.turns, args.system, args.question, args.answer,
                args.think, args.concurrency)  # fmt: skip
    model = prepare_random_model(
        RandomModelSpec(layers=args.layers, hidden=args.hidden, max_position=16384)
    )
    rows, results = combinations(quick=args.quick), []
    with Progress(console=console) as progress:
        task = progress.add_task("combinations", total=len(rows))
        for combination in rows:
            progress.update(task, description=combination.name)
            results.append(run(combination, load, model, args))
            progress.advance(task)
    show(results, console)
    subtitle = (
        f"{args.layers} x {args.hidden} random model on CPU, P's prefix cache off, "
        f"{args.conversations} conversations of {args.turns} turns, {args.concurrency} at once"
    )
    write_page(results, args.out, subtitle)
    console.print(f"{args.out}/policies.png, {args.out}/policies.html")
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
