"""A ``Sim`` in a process of its own, so that it can be killed.

Run as a program it reads one JSON request per line and answers each with one
line; ``RemoteSim`` is the other end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import stopping

_START_S = 90.0
_ANSWER_S = 60.0


class RemoteSim:
    """A decode engine behind a pipe; the same calls as ``Sim`` where tests need them."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._buffer = b""
        self.address = self._read(_START_S)["address"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(_ANSWER_S)

    def complete(self, name: str, prompt: list[int], **fields: Any) -> list[int]:
        answer: list[int] = self.ask(name=name, prompt=prompt, **fields)["answer"]
        return answer

    def signal(self, number: signal.Signals) -> None:
        stopping.send(self.pid, number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0, end - time.monotonic()))
            data = os.read(descriptor, 65536) if ready else b""
            assert data, "the engine process ended or did not answer in time"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message


def serve(arguments: dict[str, Any]) -> None:
    """Answer requests until the other end goes away."""
    # vLLM logs to stdout, even while it is imported; the answers need a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from support.sim import Sim

    sim = Sim("d", **arguments)
    answers.write(json.dumps({"address": sim.address}) + "\n")
    pending = ""
    while True:
        ready, _, _ = select.select([0], [], [], 0.0 if sim.scheduler.has_requests() else 0.05)
        if not ready:
            # Keep stepping, as an engine does whose clients are quiet.
            sim.step()
            continue
        data = os.read(0, 1 << 20).decode()
        if not data:
            break
        pending += data
        while "\n" in pending:
            line, pending = pending.split("\n", 1)
            request = json.loads(line)
            sim.add(
                request["name"],
                request["prompt"],
                max_tokens=request.get("max_tokens", 8),
                params=request.get("params"),
            )
            answer = sim.finish(request["name"], timeout_s=50)
            answers.write(json.dumps({"answer": answer}) + "\n")
    sim.close()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
