"""Two processes with a host agent each, the second driven over a pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support import stopping
from support.host_peer import pattern

from kvtransport.agent import Agent
from kvtransport.backend import Blocks
from kvtransport.region import Region

__all__ = ["Pair", "Remote", "blocks", "pattern"]

_PEER = Path(__file__).with_name("host_peer.py")
_ANSWER_S = 30.0


class Remote:
    """The peer process; ``call`` runs one of ``PeerProcess``'s methods in it."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        name: str = "peer",
        *,
        script: Path = _PEER,
        prefix: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_PEER.parent.parent,
        )
        self.stopped = False
        self.received = b""
        try:
            self.call("open", name=name, config=config or {})
        except BaseException:
            self.end()
            raise

    def call(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        fd = self.process.stdout.fileno()
        while b"\n" not in self.received:
            ready, _, _ = select.select([fd], [], [], _ANSWER_S)
            assert ready, "the peer process does not answer"
            part = os.read(fd, 1 << 16)
            assert part, "the peer process ended"
            self.received += part
        line, _, self.received = self.received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"] + "\n" + answer["trace"])
        return answer["ok"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop the process, and return once each of its threads really has."""
        stopping.send(self.process.pid, signal.SIGSTOP)
        self.stopped = True
        tasks = Path(f"/proc/{self.process.pid}/task")
        end = time.monotonic() + _ANSWER_S
        while any(b") T" not in (task / "stat").read_bytes() for task in tasks.iterdir()):
            assert time.monotonic() < end, "the peer process does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


class Pair:
    """An agent here, one there, each knowing the other."""

    def __init__(
        self,
        config: dict[str, Any],
        remote_config: dict[str, Any] | None = None,
        remote: Remote | None = None,
    ) -> None:
        self.remote = remote or Remote(remote_config or config)
        self.agent = Agent.open("host", name="here", config=config)
        self.local: dict[str, Region] = {}
        self.here: np.ndarray
        self.backend = self.agent._backend

    def memory(self, name: str, nbytes: int, fill: int = 0) -> np.ndarray:
        """Local registered memory; its region is ``self.local[name]``."""
        buffer = np.full(nbytes, fill, np.uint8)
        self.local[name] = self.agent.register(buffer, name=name)
        return buffer

    def connect(self) -> None:
        """Exchange metadata as it is now."""
        self.peer = self.agent.add_peer(bytes.fromhex(self.remote.call("export")))
        self.remote.call("add_peer", blob=self.agent.metadata().hex())

    def counters(self) -> dict[str, int]:
        return dict(self.backend.counters())

    def close(self) -> None:
        if self.remote.stopped:
            self.remote.thaw()
        try:
            self.agent.close()
        finally:
            self.remote.end()
        assert self.agent._inflight.contract_errors == 0, "a second or unknown completion"


def blocks(
    local: int, local_offset: list[int], remote: int, remote_offset: list[int], nbytes: list[int]
) -> Blocks:
    """Descriptors as the core hands them to a backend, without the core's checks."""
    n = len(nbytes)
    return Blocks(
        np.full(n, local, np.int64),
        np.array(local_offset, np.uint64),
        np.full(n, remote, np.int64),
        np.array(remote_offset, np.uint64),
        np.array(nbytes, np.uint64),
    )
