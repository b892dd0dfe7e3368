"""What a process holds: descriptors, threads, shared mappings, shared memory files.

Two snapshots around a check tell what the check left behind.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_INODE = re.compile(r"\[\d+\]|\d+")
_SHM = "/dev/shm"  # noqa: S108  # looked at, never written
_SHARED = ("/memfd:", f"{_SHM}/")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts by kind; equal counts mean that nothing was left behind."""

    descriptors: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    mappings: Counter[str] = field(default_factory=Counter)
    shm_files: frozenset[str] = frozenset()

    def residue(self, before: Snapshot) -> list[str]:
        """Name what is here and was not there ``before``."""
        found = []
        for word, now, then in (
            ("descriptor", self.descriptors, before.descriptors),
            ("thread", self.threads, before.threads),
            ("shared mapping", self.mappings, before.mappings),
        ):
            found += [f"{count} more {word} {kind}" for kind, count in sorted((now - then).items())]
        mine = sorted(name for name in self.shm_files - before.shm_files if not _in_use(name))
        found += [f"file /dev/shm/{name}" for name in mine]
        return found


def snapshot() -> Snapshot:
    """Look at this process through /proc; empty where /proc does not exist."""
    return Snapshot(_descriptors(), _threads(), _mappings(), _shm_files())


def settled_residue(before: Snapshot, patience_s: float = 1.0) -> list[str]:
    """Return the residue once it is empty, or after ``patience_s``.

    Threads and sockets may need a moment to end after ``close`` returned.
    """
    deadline = time.monotonic() + patience_s
    gc.collect()
    while (residue := snapshot().residue(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if not residue:
        return []
    # Files in /dev/shm may be another process's, on their way; ours stay.
    time.sleep(0.1)
    again = set(snapshot().residue(before))
    return [entry for entry in residue if entry in again]


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not exist."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for number in _list("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{number}").readlink())
        except OSError:
            continue  # the descriptor of this very listing
        kinds[_INODE.sub("", target)] += 1
    return kinds


def _threads() -> Counter[str]:
    """Native threads by their kernel name, so that driver threads count as well."""
    names: Counter[str] = Counter()
    for task in _list("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue  # it ended just now
        names[_INODE.sub("", name)] += 1
    return names or Counter(thread.name for thread in threading.enumerate())


def _mappings() -> Counter[str]:
    kinds: Counter[str] = Counter()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return kinds
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_SHARED):
            kinds[_INODE.sub("", path)] += 1
    return kinds


def _shm_files() -> frozenset[str]:
    # Semaphores are left out: glibc maps them under another name, so that nobody
    # can tell whose they are.
    return frozenset(name for name in _list(_SHM) if not name.startswith("sem."))


def _in_use(name: str) -> bool:
    """Whether another process has a file of /dev/shm open or mapped: then it is theirs."""
    path = f"{_SHM}/{name}"
    if not Path(path).exists():
        return True
    for process in _list("/proc"):
        if not process.isdigit() or int(process) == os.getpid():
            continue
        try:
            if path in Path(f"/proc/{process}/maps").read_text():
                return True
        except OSError:
            continue  # gone, or not ours to look at
    return False


def _list(path: str) -> list[str]:
    try:
        return [entry.name for entry in Path(path).iterdir()]
    except OSError:
        return []
