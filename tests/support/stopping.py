"""SIGSTOP that has taken effect."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def send(pid: int, number: int) -> None:
    """Send a signal; after SIGSTOP return when every thread of the process has stopped.

    The kernel stops a process when one of its threads takes the signal, and on a
    busy machine the others go on for milliseconds until then.
    """
    os.kill(pid, number)
    deadline = time.monotonic() + 5.0
    while number == signal.SIGSTOP and not _stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _stopped(pid: int) -> bool:
    tasks = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    # The state follows the name, which is in brackets and may contain any.
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
