"""What a process holds: descriptors, threads, shared mappings, shared memory files.

Two snapshots around a check tell what the check left behind.
"""

from __future__ import annotations

import contextlib
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
        mine = sorted(self.shm_files - before.shm_files)
        return [*found, *(f"file {_SHM}/{name}" for name in mine)]


_touched: set[str] = set()
"""Names below /dev/shm that this process was seen to use; others' files are theirs."""


def note_shared_memory() -> None:
    """Remember which files of /dev/shm this process uses now, before it lets go of them."""
    for line in _maps():
        _touched.update(_name_in(line.split(maxsplit=5)[-1]))
    for number in _list("/proc/self/fd"):
        with contextlib.suppress(OSError):
            _touched.update(_name_in(str(Path(f"/proc/self/fd/{number}").readlink())))


def _name_in(path: str) -> list[str]:
    return [path.removeprefix(f"{_SHM}/")] if path.startswith(f"{_SHM}/") else []


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
    return residue


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
    paths = (line.split(maxsplit=5)[-1] for line in _maps())
    return Counter(_INODE.sub("", path) for path in paths if path.startswith(_SHARED))


def _maps() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []


def _shm_files() -> frozenset[str]:
    return frozenset(_list(_SHM)) & _touched


def _list(path: str) -> list[str]:
    try:
        return [entry.name for entry in Path(path).iterdir()]
    except OSError:
        return []
