"""Both sides of a two-process test of a NIXL backend, at the backend's own level."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from support import stopping
from support.nixl_peer import pattern

from kvtransport.backend import Blocks, Completion, Event, Notification, Op, PeerDown, RegionSpec

LOCAL, REMOTE = 3, 7
"""Region ids of the memory that ``Here`` and ``There`` begin with."""


class There:
    """A process with one backend and, as region ``REMOTE``, memory filled from seed 1."""

    def __init__(
        self,
        backend: str,
        config: dict[str, Any],
        nbytes: int,
        *,
        name: str = "there",
        kind: str = "host",
        prefix: tuple[str, ...] = (),
    ) -> None:
        script = Path(__file__).with_name("nixl_peer.py")
        # The peer answers on descriptor 3: libraries print on 1 and 2.
        command = ["sh", "-c", 'exec "$0" "$1" 3>&1 1>&2', sys.executable, str(script)]
        self.process = subprocess.Popen(
            [*prefix, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.nbytes = nbytes
        self.pid = self.ask("open", backend=backend, name=name, config=config)["pid"]
        self.ask("alloc", region=REMOTE, nbytes=nbytes, seed=1)
        self.ask("register", region=REMOTE, kind=kind)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the peer ended with status {self.process.wait(5)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        return answer

    def export(self) -> bytes:
        return base64.b64decode(self.ask("export")["body"])

    def digest(self, start: int = 0, stop: int | None = None, region: int = REMOTE) -> str:
        stop = self.nbytes if stop is None else stop
        return self.ask("digest", region=region, start=start, stop=stop)["digest"]

    def signal(self, number: int) -> None:
        stopping.send(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            try:
                self.kill()
            except ProcessLookupError:
                self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Here:
    """This process's backend and, as region ``LOCAL``, memory filled from seed 2."""

    def __init__(
        self,
        backend: str,
        config: dict[str, Any],
        nbytes: int,
        *,
        name: str = "here",
        kind: str = "host",
    ) -> None:
        info = importlib.import_module(f"kvtransport_backends.{backend}").INFO
        self.config = info.config(**config)
        self.backend = info.load()()
        self.backend.open(name, self.config)
        self.memory = pattern(nbytes, 2)
        self.register(LOCAL, self.memory, kind)
        self.events: list[Event] = []
        self._ticket = 0

    def end(self) -> None:
        self.backend.close()

    def refill(self) -> None:
        """Memory and events as in the beginning."""
        self.memory[:] = pattern(self.memory.nbytes, 2)
        self.events.clear()

    def register(self, region: int, memory: Any, kind: str = "host") -> None:
        self.backend.register(
            RegionSpec(region, memory.ctypes.data, memory.nbytes, kind=kind, owner=memory)
        )

    def post(self, op: Op, blocks: Blocks, peer: int = 1, notify: bytes | None = None) -> int:
        self._ticket += 1
        self.backend.post(self._ticket, op, peer, blocks, notify)
        return self._ticket

    def poll(self) -> list[Event]:
        new = list(self.backend.poll())
        self.events += new
        return new

    def completion(self, ticket: int) -> Completion | None:
        for event in self.events:
            if isinstance(event, Completion) and event.ticket == ticket:
                return event
        return None

    def wait(self, *tickets: int, timeout_s: float = 20.0) -> list[Completion]:
        """The completions of ``tickets``; fails when they do not come."""
        until = time.monotonic() + timeout_s
        while True:
            self.poll()
            found = [self.completion(ticket) for ticket in tickets]
            if None not in found:
                return [one for one in found if one is not None]
            assert time.monotonic() < until, f"no completion of {tickets}: {self.events}"

    def run(self, op: Op, blocks: Blocks, peer: int = 1, notify: bytes | None = None) -> Completion:
        return self.wait(self.post(op, blocks, peer, notify))[0]

    def idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.poll()
            time.sleep(0.001)

    @property
    def lost_peers(self) -> list[int]:
        return [event.peer_id for event in self.events if isinstance(event, PeerDown)]

    @property
    def notifications(self) -> list[Notification]:
        return [event for event in self.events if isinstance(event, Notification)]


def blocks(
    nbytes: Any,
    local_offset: Any,
    remote_offset: Any,
    local_region: Any = LOCAL,
    remote_region: Any = REMOTE,
) -> Blocks:
    """Descriptors from vectors and scalars."""
    count = len(local_offset)
    return Blocks(
        np.full(count, local_region, np.int64),
        np.array(local_offset, np.uint64),
        np.full(count, remote_region, np.int64),
        np.array(remote_offset, np.uint64),
        np.full(count, nbytes, np.uint64),
    )


def scattered(
    count: int, block: int, total: int, seed: int = 0, remote_region: int = REMOTE
) -> Blocks:
    """``count`` blocks at random places, in an unrelated order on either side."""
    rng = np.random.default_rng(seed)
    places = [rng.permutation(total // block)[:count] * block for _ in range(2)]
    return blocks(block, *places, remote_region=remote_region)


def move(op: Op, what: Blocks, local: Any, remote: Any) -> None:
    """Do to two byte arrays what a transfer must do."""
    for here, there, size in zip(
        what.local_offset.tolist(), what.remote_offset.tolist(), what.nbytes.tolist(), strict=True
    ):
        if op is Op.READ:
            local[here : here + size] = remote[there : there + size]
        else:
            remote[there : there + size] = local[here : here + size]


def digest(memory: Any) -> str:
    return hashlib.blake2b(memory, digest_size=16).hexdigest()
