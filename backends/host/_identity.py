"""Which process of which machine an agent is.

A process id alone proves nothing: it is recycled, and it means something else
in another pid namespace.  An identity is usable only on the same boot, in the
same pid namespace and while the process that holds the id started at the same
clock tick.  The proof that it is really our peer is a nonce read from its
memory (``_vm.py``); these checks come first so that a stranger is not read.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """``boot_id`` and ``pid_namespace`` are opaque; ``start_ticks`` is since boot."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int


def own_identity() -> ProcessIdentity:
    """Describe the calling process; raises ``OSError`` without a readable /proc."""
    pid = os.getpid()
    namespace = str(Path("/proc/self/ns/pid").readlink())
    return ProcessIdentity(_boot_id(), namespace, pid, start_ticks(pid))


def mismatch(peer: ProcessIdentity, own: ProcessIdentity) -> tuple[str, bool]:
    """Why ``peer`` is no process that we can name (empty when it is one).

    The second value is True when that is because the process ended.
    """
    if peer.boot_id != own.boot_id:
        return "it runs on another machine", False
    if peer.pid_namespace != own.pid_namespace:
        spaces = f"{peer.pid_namespace}, this process in {own.pid_namespace}"
        return f"it runs in pid namespace {spaces}", False
    try:
        ticks = start_ticks(peer.pid)
    except OSError:
        return f"process {peer.pid} does not exist any more", True
    if ticks != peer.start_ticks:
        ended = f"started at tick {ticks}, not {peer.start_ticks}"
        return f"process id {peer.pid} was recycled: {ended}", True
    return "", False


def start_ticks(pid: int) -> int:
    """Clock ticks from boot to the start of ``pid``; raises ``OSError``."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # The command name may hold spaces and parentheses: count from its end.
    return int(stat.rpartition(b")")[2].split()[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def yama_scope() -> int:
    """Yama's ``ptrace_scope``: 0 where any process of the user may be read."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text("ascii"))
    except OSError:
        return 0
