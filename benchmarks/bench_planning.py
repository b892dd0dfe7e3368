"""Planning and merging of large transfers: medians, descriptors and targets.

``python benchmarks/bench_planning.py``: 100,000 tokens in blocks of 16, 80
layers, K and V apart: 160 tables with the same 6,250 blocks.  Nothing is moved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.loopback import Loopback

from kvtransport.agent import Agent
from kvtransport.backend import Op
from kvtransport.layout.blocks import AnyPair, BlockTable, Pair
from kvtransport.peer import Peer
from kvtransport.plan import Plan

BLOCKS, TABLES, POOL = 6_250, 160, 16_384
BLOCK_NBYTES = 64 << 10
TARGET_MS = 10.0

Indices = tuple[np.ndarray, np.ndarray]


def contiguous(_: np.random.Generator) -> Indices:
    """One run."""
    return np.arange(BLOCKS), np.arange(BLOCKS) + 100


def descending(_: np.random.Generator) -> Indices:
    """One run, listed from its end, as allocators often do."""
    return np.arange(BLOCKS)[::-1] + 7, np.arange(BLOCKS)[::-1]


def runs_of_16(rng: np.random.Generator) -> Indices:
    """Runs of 16 blocks on one side."""
    starts = rng.permutation(POOL // 16)[: BLOCKS // 16 + 1] * 16
    local = (starts[:, None] + np.arange(16)).ravel()[:BLOCKS]
    return local, np.arange(BLOCKS)


def alternating(_: np.random.Generator) -> Indices:
    """Every second block: nothing to merge."""
    return np.arange(BLOCKS) * 2, np.arange(BLOCKS)


def shuffled(rng: np.random.Generator) -> Indices:
    """Random blocks on both sides: nothing to merge."""
    return rng.permutation(POOL)[:BLOCKS], rng.permutation(POOL)[:BLOCKS]


CASES: dict[str, Callable[[np.random.Generator], Indices]] = {
    "contiguous": contiguous,
    "descending": descending,
    "runs of 16": runs_of_16,
    "alternating": alternating,
    "shuffled": shuffled,
}


def measure(plan: Callable[[], Plan], repeats: int) -> tuple[float, Plan]:
    """Return the median in milliseconds and the last plan."""
    times, result = [], plan()
    for _ in range(repeats):
        started = time.perf_counter()
        result = plan()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), result


def tables(here: Agent, there: Agent) -> tuple[Peer, list[tuple[BlockTable, BlockTable]]]:
    """Register addresses only (planning must not touch a byte) and pair the tables."""
    for agent in (here, there):
        for table in range(TABLES):
            memory = ((table + 1) << 40, POOL * BLOCK_NBYTES, None)
            agent.register(memory, name=f"kv.{table}")
    peer = here.add_peer(there.metadata())
    shape = (0, BLOCK_NBYTES, BLOCK_NBYTES, POOL)
    return peer, [
        (BlockTable(region, *shape), BlockTable(peer.region(region.name), *shape))
        for region in here.regions
    ]


def run(repeats: int) -> list[dict[str, Any]]:
    """Measure every case."""
    rng = np.random.default_rng(7)
    rows = []
    with Agent(Loopback(), name="here") as here, Agent(Loopback(), name="there") as there:
        peer, paired = tables(here, there)
        for name, case in CASES.items():
            local, remote = case(rng)

            def plan(local: np.ndarray = local, remote: np.ndarray = remote) -> Plan:
                pairs: list[AnyPair] = [Pair.blocks(a, b, local, remote) for a, b in paired]
                return here.prepare(Op.READ, peer, pairs)

            median, result = measure(plan, repeats)
            rows.append({"case": name, "ms": round(median, 2), "descriptors": result.descriptors})
    return rows


def main() -> None:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = run(arguments.repeats)
    if arguments.json:
        print(json.dumps({"target_ms": TARGET_MS, "rows": rows}))
        return
    print(
        f"{BLOCKS} blocks x {TABLES} tables, median of {arguments.repeats}; "
        f"target {TARGET_MS:.0f} ms"
    )
    for row in rows:
        verdict = "ok" if row["ms"] <= TARGET_MS else "over"
        print(
            f"{row['case']:12} {row['ms']:7.2f} ms {row['descriptors']:10,} descriptors {verdict}"
        )


if __name__ == "__main__":
    main()
