"""Run one command that never outlives the process that asked for it.

Usage: ``guard.py GRACE_S CORES COMMAND [ARGUMENT ...]``; run by path, because it
must start fast and needs nothing but the standard library.

The guard leads a process group of its own, so a terminal's Ctrl-C does not
reach it.  Its standard input is a pipe that only the starting process holds
open: when that process ends, however it ends, the pipe closes.  Then the
command gets SIGTERM, ``GRACE_S`` seconds, and SIGKILL together with everything
that it started.  When the command ends by itself, what it left running in the
group is killed and the guard exits with the command's code (128 + signal when
a signal ended it).  Orphans of the command become the guard's children, so that
none stays behind as a zombie where process 1 does not reap.  If the guard itself
is killed, the kernel kills the command (PR_SET_PDEATHSIG), which is why this
process has one thread only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def group_members(group: int) -> list[int]:
    """Processes of one process group, zombies left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # The command's name is in parentheses and may contain anything.
            state, _parent, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(owner) == group and state != "Z":
                members.append(int(entry.name))
    return members


def _start(cores: set[int], command: list[str]) -> subprocess.Popen[bytes]:
    guard = os.getpid()

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509, S603 - one thread; the caller's own command


def _wait(child: int, timeout_s: float | None, *, or_stdin: bool) -> bool:
    """Wait for the child's end, or for the end of standard input; True if the child ended."""
    poller = select.poll()
    poller.register(child, select.POLLIN)
    if or_stdin:
        poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
    return any(descriptor == child for descriptor, _events in ready)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_rest() -> None:
    """Kill what is left of the group, until nothing is, then reap it."""
    own = os.getpid()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        rest = [pid for pid in group_members(os.getpgrp()) if pid != own]
        if not rest:
            break
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    # What is dead now has no parent left but this process.
    _reap()


def main() -> int:
    """Guard the command on the command line; return the exit code to end with."""
    grace_s = float(sys.argv[1])
    cores = {int(core) for core in sys.argv[2].split(",") if core}
    # Handlers, not SIG_IGN: exec resets handlers, an ignored signal stays ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(cores, sys.argv[3:])
    handle = os.pidfd_open(child.pid)
    if not _wait(handle, None, or_stdin=True):
        child.terminate()
        if not _wait(handle, grace_s, or_stdin=False):
            child.kill()
    code = child.wait()
    _kill_rest()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
