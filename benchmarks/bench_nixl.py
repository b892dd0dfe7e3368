"""READ through ``Agent`` and on raw NIXL, paired in one run.

Both sides run in this process and read the same memory of one peer process into
the same local memory.
Each round does the same transfer on raw NIXL, through ``Agent.read``, and by
``Agent.post`` of a plan made before, in alternating order; the medians and their
ratios to raw NIXL are printed.

Raw NIXL is measured as vLLM uses it: descriptor tables prepared once, one
request made, posted, polled and released per transfer.  ``--raw lists`` builds
descriptor lists from numpy arrays for every transfer instead.

    python benchmarks/bench_nixl.py                    # UCX picks: shared memory here
    python benchmarks/bench_nixl.py --transports tcp
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from kvtransport.agent import Agent
from kvtransport.backend import Op
from kvtransport.layout.blocks import BlockTable, Pair

NBYTES = 128 << 20
SHAPES = [(4096, 1), (65536, 1), (1 << 20, 1), (8 << 20, 1), (16384, 64), (65536, 256)]


class Raw:
    """NIXL's own agent, as lean as Python allows."""

    def __init__(self, name: str, transports: str) -> None:
        import nixl_cu12._bindings as nixl

        self.nixl = nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = 1000
        config.syncMode = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        if transports:
            os.environ["UCX_TLS"] = transports
        self.agent = nixl.nixlAgent(name, config)
        self.agent.createBackend("UCX", {})
        self.memory = aligned()
        row = np.array([[self.memory.ctypes.data, NBYTES, 0]], np.uint64)
        self.agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, row), [])

    def connect(self, address: int, metadata: bytes) -> None:
        self.remote = address
        self.peer = self.agent.loadRemoteMD(metadata).decode()

    def prepare(self, block: int) -> None:
        rows = [[base, block, 0, block, NBYTES // block] for base in self._bases()]
        tables = [np.array([row], np.uint64) for row in rows]
        self.local_table = self.agent.prepXferDlist("", self.nixl.DRAM_SEG, tables[0], [])
        self.remote_table = self.agent.prepXferDlist(self.peer, self.nixl.DRAM_SEG, tables[1], [])

    def _bases(self) -> tuple[int, int]:
        return self.memory.ctypes.data, self.remote

    def read_tables(self, local: Any, remote: Any, block: int) -> None:  # noqa: ARG002
        handle = self.agent.makeXferReq(
            self.nixl.NIXL_READ, self.local_table, local, self.remote_table, remote, b"", [], False
        )
        self._run(handle)

    def read_lists(self, local: Any, remote: Any, block: int) -> None:
        lists = []
        for base, index in zip(self._bases(), (local, remote), strict=True):
            rows = np.empty((len(index), 3), np.uint64)
            rows[:, 0] = base + index.astype(np.uint64) * np.uint64(block)
            rows[:, 1] = block
            rows[:, 2] = 0
            lists.append(self.nixl.nixlXferDList(self.nixl.DRAM_SEG, rows))
        handle = self.agent.createXferReq(self.nixl.NIXL_READ, *lists, self.peer, b"", [])
        self._run(handle)

    def _run(self, handle: int) -> None:
        status = self.agent.postXferReq(handle, b"")
        while status == self.nixl.NIXL_IN_PROG:
            os.sched_yield()
            status = self.agent.getXferStatus(handle)
        self.agent.releaseXferReq(handle)


def aligned() -> Any:
    """Pages of memory, touched."""
    memory = np.empty(NBYTES + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    memory[:] = 1
    return memory[start : start + NBYTES]


def target(transports: str) -> None:
    """Be the peer until stdin ends."""
    raw = Raw("raw-target", transports)
    agent = Agent.open("cuda", name="target", config={"transports": transports})
    raw.memory[:] = 7
    agent.register(raw.memory, name="kv")
    described = {
        "address": raw.memory.ctypes.data,
        "metadata": base64.b64encode(raw.agent.getLocalMD()).decode(),
        "blob": base64.b64encode(agent.metadata()).decode(),
    }
    print(json.dumps(described), flush=True)
    sys.stdin.read()
    agent.close()


def finish(agent: Agent, transfer: Any) -> None:
    """Wait as an engine does: by polling."""
    while not transfer.done:
        agent.poll()
    transfer.wait(0.0)


def measure(raw: Raw, agent: Agent, peer: Any, region: Any, options: Any) -> None:
    """Print one line per shape."""
    rng = np.random.default_rng(0)
    read_raw = raw.read_lists if options.raw == "lists" else raw.read_tables
    print(f"{'shape':>14}  {'raw NIXL':>11}  {'Agent.read':>18}  {'planned post':>18}   GB/s")
    for block, count in SHAPES:
        raw.prepare(block)
        rows = NBYTES // block
        local = rng.permutation(rows)[:count].astype(np.int32)
        remote = rng.permutation(rows)[:count].astype(np.int32)
        here = BlockTable(region, base=0, stride=block, block_nbytes=block, count=rows)
        there = BlockTable(peer.region("kv"), base=0, stride=block, block_nbytes=block, count=rows)
        plan = agent.prepare(Op.READ, peer, [Pair.blocks(here, there, local, remote)])
        calls = {
            "raw": partial(read_raw, local, remote, block),
            "read": lambda: finish(
                agent,
                agent.read(peer, [Pair.blocks(here, there, local, remote)]),  # noqa: B023
            ),
            "post": lambda: finish(agent, agent.post(plan)),  # noqa: B023
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for round_ in range(options.rounds + 10):
            for name in sorted(calls, reverse=bool(round_ % 2)):
                start = time.perf_counter()
                calls[name]()
                if round_ >= 10:
                    times[name].append(time.perf_counter() - start)
        raw_s, read_s, post_s = (statistics.median(times[name]) for name in calls)
        rate = block * count / read_s / 1e9
        print(
            f"{block:>8} x {count:<4} {raw_s * 1e6:>8.1f} us"
            f"  {read_s * 1e6:>8.1f} us ({read_s / raw_s:4.2f})"
            f"  {post_s * 1e6:>8.1f} us ({post_s / raw_s:4.2f})   {rate:.2f}"
        )


def main() -> None:
    """Start the peer and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", default="", help="UCX_TLS; empty: UCX chooses")
    parser.add_argument("--raw", choices=["tables", "lists"], default="tables")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        target(options.transports)
        return
    command = [sys.executable, __file__, "--target", "--transports", options.transports]
    peer_process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert peer_process.stdout is not None
    described = json.loads(peer_process.stdout.readline())
    raw = Raw("raw-initiator", options.transports)
    raw.connect(described["address"], base64.b64decode(described["metadata"]))
    agent = Agent.open("cuda", name="initiator", config={"transports": options.transports})
    region = agent.register(raw.memory, name="kv")
    peer = agent.add_peer(base64.b64decode(described["blob"]))
    measure(raw, agent, peer, region, options)
    peer_process.communicate(timeout=10)
    agent.close()


if __name__ == "__main__":
    main()
