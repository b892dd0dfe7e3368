"""What the core adds to a backend: READ through ``Agent`` against the backend alone.

Two processes on this host; the same descriptors, alternating in one run.  The
"backend" column posts and polls the very same opened backend without the core,
"prepared" posts one plan again and again.
``python benchmarks/bench_agent.py --backend host``
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from kvtransport.agent import Agent
from kvtransport.backend import Backend, Completion, Op
from kvtransport.layout.blocks import BlockTable, Pair

POOL_NBYTES = 64 << 20
CASES = (
    ("4 KiB x1", 4 << 10, 1),
    ("64 KiB x1", 64 << 10, 1),
    ("64 KiB x16", 64 << 10, 16),
    ("64 KiB x256", 64 << 10, 256),
    ("1 MiB x1", 1 << 20, 1),
    ("8 MiB x1", 8 << 20, 1),
)
TARGETS = {"64 KiB x1": 1.2, "64 KiB x16": 1.05, "64 KiB x256": 1.05, "1 MiB x1": 1.05}


def serve(backend: str, config: dict[str, Any]) -> None:
    """The other process: register, print metadata, poll until told to stop."""
    memory = np.full(POOL_NBYTES, 7, np.uint8)
    with Agent.open(backend, name="owner", config=config) as agent:
        agent.register(memory, name="kv")
        print(agent.metadata().hex(), flush=True)
        agent.add_peer(bytes.fromhex(sys.stdin.readline()))
        import select

        while not select.select([sys.stdin], [], [], 0.0005)[0]:
            agent.poll()


@contextmanager
def owner(backend: str, config: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Run ``serve`` in a process of its own; it ends with the block."""
    command = [sys.executable, __file__, "--serve", "--backend", backend]
    command += ["--config", json.dumps(config)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.stdin:
                process.stdin.close()
            process.wait(20)


def timed(action: Callable[[], None]) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e6


def raw_read(backend: Backend, peer_id: int, blocks: Any, tickets: Iterator[int]) -> None:
    """The same transfer without the core."""
    ticket = next(tickets)
    backend.post(ticket, Op.READ, peer_id, blocks, None)
    while True:
        for event in backend.poll():
            if isinstance(event, Completion) and event.ticket == ticket:
                if event.error is not None:
                    raise event.error
                return


def measure(backend: str, config: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Medians per case, both ways."""
    memory = np.zeros(POOL_NBYTES, np.uint8)
    rows = []
    with (
        owner(backend, config) as process,
        Agent.open(backend, name="reader", config=config) as agent,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        region = agent.register(memory, name="kv")
        peer = agent.add_peer(bytes.fromhex(process.stdout.readline()))
        process.stdin.write(agent.metadata().hex() + "\n")
        process.stdin.flush()
        raw, tickets = agent._backend, count(1 << 50)  # noqa: SLF001  # what is compared with
        for name, nbytes, blocks in CASES:
            # Every second block, so that nothing merges.
            slots = POOL_NBYTES // nbytes
            index = (np.arange(blocks) * 2) % slots
            mine = BlockTable(region, 0, nbytes, nbytes, slots)
            theirs = BlockTable(peer.region("kv"), 0, nbytes, nbytes, slots)
            pairs = [Pair.blocks(mine, theirs, index, index)]
            (part,) = agent.prepare(Op.READ, peer, pairs).parts

            plan = agent.prepare(Op.READ, peer, pairs)

            def through_agent(pairs: Any = pairs) -> None:
                agent.read(peer, pairs).wait()

            def prepared(plan: Any = plan) -> None:
                agent.post(plan).wait()

            def alone(part: Any = part) -> None:
                raw_read(raw, peer.peer_id, part, tickets)

            actions = (through_agent, prepared, alone)
            for action in actions:
                for _ in range(20):
                    action()
            times = [[timed(action) for action in actions] for _ in range(repeats)]
            a, p, b = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append(
                {
                    "case": name,
                    "agent_us": a,
                    "prepared_us": p,
                    "backend_us": b,
                    "ratio": statistics.median(t[0] / t[2] for t in times),
                    "prepared_ratio": statistics.median(t[1] / t[2] for t in times),
                }
            )
        assert (memory[: 4 << 10] == 7).all(), "nothing was moved"
    return rows


def main() -> None:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="host")
    parser.add_argument("--config", default="{}", help="JSON object of backend options")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = json.loads(arguments.config)
    if arguments.serve:
        serve(arguments.backend, config)
        return
    rows = measure(arguments.backend, config, arguments.repeats)
    if arguments.json:
        print(json.dumps({"backend": arguments.backend, "rows": rows}))
        return
    print(f"{arguments.backend}: READ, median of {arguments.repeats} pairs, microseconds")
    for row in rows:
        target = TARGETS.get(row["case"])
        note = f"target {target}" if target else ""
        print(
            f"{row['case']:12} agent {row['agent_us']:8.1f}  prepared {row['prepared_us']:8.1f}  "
            f"backend {row['backend_us']:8.1f}  ratios {row['ratio']:.3f} "
            f"{row['prepared_ratio']:.3f}  {note}"
        )


if __name__ == "__main__":
    main()
