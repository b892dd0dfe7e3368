"""The other process of the host backend's tests: an agent driven over a pipe.

Reads one JSON object per line, ``{"do": name, ...arguments}``, answers one per
line.  Runs no progress of its own, so whatever works while it waits for a
command is one-sided.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import mmap
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from kvtransport.agent import Agent
from kvtransport.layout.blocks import Pair
from kvtransport.region import Region


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that both processes can compute."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class PeerProcess:
    def __init__(self) -> None:
        self.agent: Agent
        self.buffers: dict[str, np.ndarray] = {}
        self.regions: dict[str, Region] = {}
        self.peers: dict[str, Any] = {}

    def open(self, name: str, config: dict[str, Any]) -> None:
        self.agent = Agent.open("host", name=name, config=config)

    def register(self, name: str, nbytes: int, seed: int = 0, access: str = "rw") -> int:
        """Register page-aligned memory of its own, filled with ``pattern``."""
        memory = mmap.mmap(-1, nbytes)
        self.buffers[name] = np.frombuffer(memory, np.uint8)
        self.buffers[name][:] = pattern(seed, nbytes)
        return self.register_again(name, access)

    def register_again(self, name: str, access: str = "rw") -> int:
        region = self.agent.register(self.buffers[name], name=name, access=access)
        self.regions[name] = region
        return region.region_id

    def deregister(self, name: str) -> None:
        self.agent.deregister(self.regions.pop(name))

    def unmap(self, name: str) -> None:
        """Pull the pages away under a region that stays registered."""
        buffer = self.buffers[name]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        no_access, fixed = 0, 0x10 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        assert libc.mmap(buffer.ctypes.data, buffer.nbytes, no_access, fixed, -1, 0) > 0

    def fill(self, name: str, seed: int) -> None:
        self.buffers[name][:] = pattern(seed, self.buffers[name].nbytes)

    def set(self, name: str, value: int) -> None:
        self.buffers[name][:] = value

    def digest(self, name: str, start: int = 0, stop: int | None = None) -> str:
        return hashlib.sha256(self.buffers[name][start:stop].tobytes()).hexdigest()

    def export(self) -> str:
        return self.agent.metadata().hex()

    def add_peer(self, blob: str) -> None:
        peer = self.agent.add_peer(bytes.fromhex(blob))
        self.peers[peer.name] = peer

    def post(self, op: str, peer: str, local: str, remote: str, nbytes: int) -> None:
        target = self.peers[peer]
        ranges = Pair.ranges(self.regions[local], [0], target.region(remote), [0], [nbytes])
        self.transfer = getattr(self.agent, op)(target, [ranges])

    def wait(self) -> str:
        self.transfer.wait(20)
        return self.transfer.state.value

    def notifications(self) -> list[tuple[str, str]]:
        self.agent.poll()
        return [(n.peer.name, n.payload.hex()) for n in self.agent.notifications()]

    def counters(self) -> dict[str, int]:
        return dict(self.agent._backend.counters())

    def churn(self, name: str, rounds: int) -> None:
        """Register a buffer of ones, withdraw it, scribble over it; many times."""
        buffer = self.buffers[name]
        for _ in range(rounds):
            buffer[:] = 1
            self.register_again(name)
            self.deregister(name)
            buffer[:] = 2

    def fork_child(self) -> int:
        """A child that inherited everything and outlives this process."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.close(1)
            time.sleep(30)
            os._exit(0)
        return pid

    def close(self) -> None:
        self.agent.close()

    def resources(self) -> tuple[int, int]:
        """Open descriptors and threads."""
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    def collect(self) -> None:
        gc.collect()


def main() -> None:
    process = PeerProcess()
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "exit":
            return
        try:
            answer = {"ok": getattr(process, do)(**command)}
        except Exception as error:  # noqa: BLE001  # the other process raises it
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
