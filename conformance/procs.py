"""Child processes of the controller: started, read, signalled and buried here."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtransport_conformance.wire import MAX_LINE, decode, encode

_TAIL_BYTES = 16_000
_LAST_LINES = 6
_FRAMES = 10


@dataclass(frozen=True, slots=True)
class Message:
    """What a child said; ``body`` is None at its end, ``bad`` is unreadable output."""

    child: Child
    body: dict[str, Any] | None
    bad: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """How children are started: wrapping command, interpreter, folder for their logs."""

    logs: Path
    local_prefix: Sequence[str] = ()
    peer_prefix: Sequence[str] = ()
    python: str = sys.executable
    peer_python: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *, peer: bool) -> list[str]:
        module = "peer" if peer else "worker"
        prefix = self.peer_prefix if peer else self.local_prefix
        python = (self.peer_python if peer else "") or self.python
        return [*prefix, python, "-m", f"kvtransport_conformance.{module}"]


class Child:
    """One worker or peer; what it says arrives in ``inbox`` as ``Message``.

    Standard error, and whatever the backend prints, goes to a log file.
    """

    def __init__(
        self, name: str, launch: Launch, inbox: queue.Queue[Message], *, peer: bool
    ) -> None:
        self.name = name
        self.log = launch.logs / f"{name}-{time.monotonic_ns()}.log"
        self.asked_to_end = False
        self.ended = False
        self.identity: dict[str, Any] = {}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own module, and the user's prefix
                launch.command(peer=peer),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **launch.environment},
                start_new_session=True,
            )
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, name=f"kvt-read-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> bool:
        """Write a message; False when the child is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(MAX_LINE):
                try:
                    self._inbox.put(Message(self, decode(line)))
                except ValueError as error:
                    self._inbox.put(Message(self, None, bad=f"{error}: {line[:80]!r}"))
        self._inbox.put(Message(self, None))

    # Signals -----------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Signal the test process itself, below any wrapping command."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._target_pid(), number)

    def _target_pid(self) -> int:
        """The host's number of a process that may see itself under another one."""
        seen = int(self.identity.get("pid", 0))
        if not seen or seen == self.pid:
            return self.pid
        return next(
            (pid for pid in _descendants(self.pid) if _innermost_pid(pid) == seen), self.pid
        )

    def await_state(self, letters: str, patience_s: float = 2.0) -> None:
        """Wait until the kernel shows one of ``letters`` as the process's state."""
        deadline = time.monotonic() + patience_s
        path = Path(f"/proc/{self._target_pid()}/stat")
        while time.monotonic() < deadline:
            try:
                state = path.read_text().rpartition(")")[2].split()[0]
            except OSError:
                return
            if state in letters:
                return
            time.sleep(0.002)

    def stacks(self) -> str:
        """Ask every thread for its stack; return what the log got from it."""
        before = self.log.stat().st_size
        if self._process.poll() is not None:
            return "ended already"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._target_pid(), signal.SIGUSR1)
        time.sleep(0.2)
        with self.log.open("rb") as log:
            log.seek(before)
            return main_stack(log.read().decode(errors="replace"))

    # End -----------------------------------------------------------------------------

    def end(self, patience_s: float = 2.0) -> None:
        """Ask, wait, then kill the child and everything it started; idempotent."""
        self.asked_to_end = True
        running = self._process.poll() is None
        if running:
            self.send({"op": "exit", "id": 0})
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if running:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(2.0)

    def kill(self) -> None:
        self.asked_to_end = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def exit_code(self, patience_s: float) -> int | None:
        """Wait for the end; None when it does not come."""
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None

    def epitaph(self) -> str:
        """How the child ended and its last words."""
        code = self.exit_code(1.0)
        if code is None:
            how = "closed its channel but still runs"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return f"{how}; last output: {self.last_words()}"

    def last_words(self) -> str:
        """The end of the log; of a fatal error also the stack's innermost calls."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        before, fatal, after = text.partition("Fatal Python error")
        lines = before.strip().splitlines()[-_LAST_LINES:]
        if fatal:
            lines.append(fatal + after.partition("\n")[0])
            lines += main_stack(after).splitlines()
        return "\n".join(lines) or "nothing"


def main_stack(dump: str) -> str:
    """The innermost calls of the thread that a stack dump calls the current one."""
    _, found, rest = dump.partition("Current thread")
    lines = rest.splitlines()[1 : _FRAMES + 1] if found else dump.splitlines()[:_FRAMES]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def split_prefix(text: str) -> tuple[str, ...]:
    """Split a wrapping command as a shell would."""
    return tuple(shlex.split(text))


def _descendants(pid: int) -> list[int]:
    """Every process below ``pid``, through /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue  # gone already
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, queued = [], [pid]
    while queued:
        children = parents.get(queued.pop(), [])
        found += children
        queued += children
    return found


def _innermost_pid(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((row for row in status.splitlines() if row.startswith("NSpid:")), "")
    return int(line.split()[-1]) if line else 0
