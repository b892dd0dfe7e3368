"""Counts of what was moved and by which path."""

from __future__ import annotations

import threading
from collections.abc import Mapping

NAMES = (
    "vm_read_bytes",
    "vm_write_bytes",
    "tcp_read_bytes",
    "tcp_write_bytes",
    "served_read_bytes",
    "served_write_bytes",
    "peers_vm",
    "peers_tcp",
    "pull_refused",
    "notifications_sent",
    "notifications_received",
    "connections_refused",
)


class Counters:
    """Thread-safe; every name of ``NAMES`` is always present."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._values)
