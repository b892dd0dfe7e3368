"""The host backend against a single-thread memcpy of the same blocks, in turn.

Two processes on this host.  Every row moves the same permuted blocks; rounds
alternate between memcpy and each way, so that a busy machine slows all alike.
memcpy copies between two buffers of this process, one ``memmove`` per block.
``python benchmarks/bench_host.py``
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtransport.agent import Agent
from kvtransport.layout.blocks import BlockTable, Pair
from kvtransport.peer import Peer
from kvtransport.region import Region

POOL_NBYTES = 256 << 20
CASES = (
    ("4 KiB x1", 4 << 10, 1),
    ("4 KiB x4096", 4 << 10, 4096),
    ("16 KiB x1024", 16 << 10, 1024),
    ("64 KiB x1", 64 << 10, 1),
    ("64 KiB x16", 64 << 10, 16),
    ("64 KiB x1024", 64 << 10, 1024),
    ("1 MiB x64", 1 << 20, 64),
    ("8 MiB x8", 8 << 20, 8),
)
TARGET = 0.6
WAYS = ("vm read", "vm write", "tcp read", "tcp write")


def serve(path: str) -> None:
    """The other process: register, print metadata, then sleep: all is one-sided."""
    memory = np.full(POOL_NBYTES, 7, np.uint8)
    with Agent.open("host", name="owner", config={"path": path}) as agent:
        agent.register(memory, name="kv")
        print(agent.metadata().hex(), flush=True)
        sys.stdin.readline()


@dataclass(frozen=True)
class Side:
    """An agent of this process and its peer, over one path."""

    agent: Agent
    region: Region
    peer: Peer

    def move(self, op: str, mine: Any, theirs: Any, block: int) -> None:
        """One transfer of permuted blocks, from planning to completion."""
        tables = (
            BlockTable(region, base=0, stride=block, block_nbytes=block, count=POOL_NBYTES // block)
            for region in (self.region, self.peer.region("kv"))
        )
        transfer = getattr(self.agent, op)(self.peer, [Pair.blocks(*tables, mine, theirs)])
        transfer.wait(60)


@contextmanager
def side(path: str, memory: Any) -> Iterator[Side]:
    """Start the other process and connect to it."""
    command = [sys.executable, __file__, "--serve", path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        with Agent.open("host", name="bench", config={"path": path}) as agent:
            region = agent.register(memory, name="mine")
            yield Side(agent, region, agent.add_peer(bytes.fromhex(process.stdout.readline())))
        process.stdin.close()


def memcpy(target: int, source: int, mine: list[int], theirs: list[int], block: int) -> None:
    """The baseline: one C call per block."""
    move = ctypes.memmove
    for here, there in zip(mine, theirs, strict=True):
        move(target + here * block, source + there * block, block)


def timed(action: Callable[[], None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(
    sides: dict[str, Side], here: Any, source: Any, block: int, count: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per round of memcpy and of each way."""
    rng = np.random.default_rng(block + count)
    slots = POOL_NBYTES // block
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *WAYS)}
    for turn in range(rounds + 1):
        mine, theirs = rng.permutation(slots)[:count], rng.permutation(slots)[:count]
        addresses = here.ctypes.data, source.ctypes.data
        rows = mine.tolist(), theirs.tolist()
        actions = {"memcpy": partial(memcpy, *addresses, *rows, block)}
        for way in WAYS:
            path, op = way.split()
            actions[way] = partial(sides[path].move, op, mine, theirs, block)
        for name, action in actions.items():
            elapsed = timed(action)
            if turn:  # the first round connects and touches the pages
                seconds[name].append(elapsed)
    return seconds


def show(label: str, nbytes: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Print one row; rates for bulk, microseconds for single small blocks."""
    base = statistics.median(seconds["memcpy"])
    row: dict[str, Any] = {"case": label}
    cells = [f"{label:>14}"]
    for name, values in seconds.items():
        median = statistics.median(values)
        ratios = [b / v for b, v in zip(seconds["memcpy"], values, strict=True)]
        row[name] = {"us": median * 1e6, "gb_s": nbytes / median / 1e9}
        row[name]["of_memcpy"] = statistics.median(ratios)
        share = f" {row[name]['of_memcpy']:5.2f}" if name != "memcpy" else ""
        cells.append(f"{nbytes / median / 1e9:6.2f} GB/s {median * 1e6:8.0f} us{share}")
    row["memcpy_us"] = base * 1e6
    print(" | ".join(cells), flush=True)
    return row


def main() -> None:
    """Print the table, and with ``--json`` write it too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    here, source = (np.full(POOL_NBYTES, fill, np.uint8) for fill in (1, 7))
    print(" " * 14, *(f"{name:^31}" for name in ("memcpy", *(f"{w} (of memcpy)" for w in WAYS))))
    with ExitStack() as stack:
        sides = {path: stack.enter_context(side(path, here)) for path in ("vm", "tcp")}
        rows = [
            show(label, block * count, measure(sides, here, source, block, count, options.rounds))
            for label, block, count in CASES
        ]
    bulk = [
        row["vm read"]["of_memcpy"]
        for row, (_, block, count) in zip(rows, CASES, strict=True)
        if block >= 64 << 10 and block * count >= 16 << 20
    ]
    print(
        f"vm READ, blocks of 64 KiB and more, 64 MiB per transfer: {min(bulk):.2f} to "
        f"{max(bulk):.2f} of memcpy (target {TARGET})"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
