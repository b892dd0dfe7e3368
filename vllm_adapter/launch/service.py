"""A supervised process that answers HTTP on 127.0.0.1.

Lifecycle
    ``start`` returns at once; ``wait_ready`` polls the health address;
    ``stop`` ends the process in order, then by force; ``kill`` is SIGKILL for
    the whole group, for tests of sudden death.  After ``stop`` or ``kill`` the
    same object can be started again on the same port.

Threading
    One thread at a time per object.  The process is independent of the
    thread that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from kvtransport.errors import KVTransportError
from kvtransport_vllm.launch import guard
from kvtransport_vllm.launch.http import request

_LOG = logging.getLogger("kvtransport.launch")
_POLL_S = 0.25
_TAIL_LINES = 25


class ServiceError(KVTransportError):
    """A service did not start, or ended although nobody asked it to.

    The message ends with the last lines of its log.
    """


class Service:
    """One command with a port, a log file and a process group of its own."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        env: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        health: str = "/health",
        grace_s: float = 8.0,
    ) -> None:
        """``env`` is added to this process's; ``cores`` pins the command to those CPUs."""
        self.name = name
        self.port = port
        self.log = log
        self._command = list(command)
        self._env = dict(env or {})
        self._cores = tuple(cores)
        self._health = health
        self._grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> Self:
        """Start the process; raises ``ServiceError`` if it already runs."""
        if self.running:
            raise ServiceError(f"{self.name} is already running on port {self.port}")
        self._forget()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        cores = ",".join(str(core) for core in self._cores)
        # -I -S: the guard needs no site-packages and must not be changed by the environment.
        command = [sys.executable, "-I", "-S", guard.__file__, str(self._grace_s), cores]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(  # noqa: S603 - the caller's own command
                [*command, *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
            )
        _LOG.debug("started %s, log %s", self.name, self.log)
        return self

    def healthy(self) -> bool:
        """Whether the service answers now; raises ``ServiceError`` if it has ended."""
        if not self.running:
            raise ServiceError(self._obituary())
        with suppress(OSError):
            request(self.port, "GET", self._health, timeout_s=2)
            return True
        return False

    def begin_stop(self) -> None:
        """Ask the process to end, but do not wait; ``stop`` must follow."""
        if self._guard is not None:
            assert self._guard.stdin is not None  # opened as a pipe in start
            self._guard.stdin.close()

    def stop(self) -> None:
        """End the process in order, by force after its grace time; idempotent."""
        self.begin_stop()
        if self._guard is None:
            return
        try:
            self._guard.wait(self._grace_s + 10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._forget()

    def kill(self) -> None:
        """SIGKILL for the process and everything that it started; idempotent.

        Returns when all of it is gone.
        """
        if self._guard is None:
            return
        if self._guard.poll() is None:
            os.killpg(self._guard.pid, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while guard.group_members(self._guard.pid) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._forget()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal (SIGSTOP, SIGCONT, ...) to every process but the guard."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """Processes of this service that are alive, the guard left out."""
        if self._guard is None or self._guard.poll() is not None:
            return []
        return [pid for pid in guard.group_members(self._guard.pid) if pid != self._guard.pid]

    def tail(self) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return "(no log)"
        with self.log.open(errors="replace") as lines:
            return "".join(deque(lines, _TAIL_LINES))

    def _forget(self) -> None:
        if self._guard is not None:
            assert self._guard.stdin is not None  # opened as a pipe in start
            self._guard.stdin.close()
            self._guard.wait(10)
            self._guard = None

    def _obituary(self) -> str:
        code = self._guard.returncode if self._guard is not None else None
        if code is None:
            return f"{self.name} was not started"
        how = f"exit code {code}"
        if code > 128:
            with suppress(ValueError):
                how = f"signal {signal.Signals(code - 128).name}"
        return f"{self.name} ended with {how}; end of {self.log}:\n{self.tail()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def stop_all(services: Sequence[Service]) -> None:
    """Stop services side by side; idempotent."""
    for service in services:
        service.begin_stop()
    for service in services:
        service.stop()


def wait_ready(
    services: Sequence[Service],
    *,
    timeout_s: float = 300.0,
    progress: Callable[[Service], None] | None = None,
) -> None:
    """Wait until all services answer; ``progress`` is called once for each that does.

    Raises ``ServiceError`` as soon as one has ended, or when the time is up;
    the services are left as they are.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(services)
    while waiting:
        for service in list(waiting):
            if service.healthy():
                waiting.remove(service)
                if progress is not None:
                    progress(service)
        if waiting and time.monotonic() > deadline:
            late = waiting[0]
            raise ServiceError(
                f"{late.name} was not ready after {timeout_s:.0f} s; "
                f"end of {late.log}:\n{late.tail()}"
            )
        if waiting:
            time.sleep(_POLL_S)
