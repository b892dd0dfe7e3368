"""The other side of a two-process test: one backend, driven by JSON lines on stdin."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import select
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvtransport.backend import Backend, Blocks, Completion, Notification, Op, RegionSpec


class Peer:
    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.memory: dict[int, np.ndarray] = {}
        self.completions: dict[int, str | None] = {}
        self.notifications: list[str] = []
        self.compute_until = 0.0

    def open(self, backend: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
        info = importlib.import_module(f"kvtransport_backends.{backend}").INFO
        backend = info.load()()
        backend.open(name, info.config(**config))
        self.backend = backend
        return {"pid": os.getpid()}

    def alloc(self, region: int, nbytes: int, seed: int) -> dict[str, Any]:
        self.memory[region] = pattern(nbytes, seed)
        return {"address": self.memory[region].ctypes.data}

    def refill(self, region: int, seed: int) -> dict[str, Any]:
        self.memory[region][:] = pattern(self.memory[region].nbytes, seed)
        self.notifications.clear()
        return {}

    def register(self, region: int, kind: str = "host") -> dict[str, Any]:
        memory = self.memory[region]
        self.backend.register(
            RegionSpec(region, memory.ctypes.data, memory.nbytes, kind=kind, owner=memory)
        )
        return {}

    def deregister(self, region: int) -> dict[str, Any]:
        self.backend.deregister(region)
        return {}

    def rename(self, old: int, new: int) -> dict[str, Any]:
        self.memory[new] = self.memory.pop(old)
        return {}

    def unmap(self, region: int, start: int, nbytes: int) -> dict[str, Any]:
        """Take pages away from under a registered region."""
        address = self.memory[region].ctypes.data + start
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            raise OSError(ctypes.get_errno(), "munmap")
        return {}

    def export(self) -> dict[str, Any]:
        return {"body": base64.b64encode(self.backend.export()).decode()}

    def load(self, peer: int, body: str) -> dict[str, Any]:
        self.backend.import_peer(peer, base64.b64decode(body))
        return {}

    def digest(self, region: int, start: int, stop: int) -> dict[str, Any]:
        data = self.memory[region][start:stop]
        return {"digest": hashlib.blake2b(data, digest_size=16).hexdigest()}

    def post(self, ticket: int, op: str, peer: int, blocks: list[list[int]]) -> dict[str, Any]:
        types = (np.int64, np.uint64, np.int64, np.uint64, np.uint64)
        columns = (np.array(column, kind) for column, kind in zip(blocks, types, strict=True))
        self.backend.post(ticket, Op(op), peer, Blocks(*columns), None)
        return {}

    def events(self) -> dict[str, Any]:
        self.poll()
        return {"completions": self.completions, "notifications": self.notifications}

    def busy(self, seconds: float) -> dict[str, Any]:
        """Answer now, then compute for a while without polling."""
        self.compute_until = time.monotonic() + seconds
        return {}

    def fds(self) -> dict[str, Any]:
        return {"fds": len(list(Path("/proc/self/fd").iterdir()))}

    def close(self) -> dict[str, Any]:
        self.backend.close()
        return {}

    def poll(self) -> None:
        while time.monotonic() < self.compute_until:
            pass
        if self.backend is None:
            return
        for event in self.backend.poll():
            if isinstance(event, Completion):
                error = event.error
                self.completions[event.ticket] = error and type(error).__name__
            elif isinstance(event, Notification):
                self.notifications.append(base64.b64encode(event.payload).decode())


def pattern(nbytes: int, seed: int) -> np.ndarray:
    """Anonymous pages of their own, filled from ``seed``."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


def main() -> None:
    peer = Peer()
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.001)
        if not ready:
            peer.poll()
            continue
        chunk = os.read(0, 1 << 20)
        if not chunk:
            return
        buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            request = json.loads(line)
            try:
                reply = getattr(peer, request.pop("do"))(**request)
            except Exception as error:  # noqa: BLE001  # the test decides what it means
                reply = {"error": type(error).__name__, "message": str(error)}
            os.write(3, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
