"""Registered memory, and how it is withdrawn while others may be using it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtransport.backend import RegionSpec
from kvtransport.errors import (
    RegionBusyError,
    RegistrationError,
    RegistrationLimitError,
    StaleDescriptorError,
    UnsupportedError,
)
from kvtransport_backends.host._body import RegionEntry
from kvtransport_backends.host._guard import Guard
from kvtransport_backends.host._table import RegionTable, access_bits

_WITHDRAW_TIMEOUT_S = 5.0


class LocalRegions:
    """The agent's own regions.  Thread-safe.

    Every copy that our threads make in a peer's name happens inside ``using``
    and is one short system call that never waits.  So ``remove`` only has to
    wait for those under way: after it no thread of ours touches the region.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._entries: dict[int, RegionEntry] = {}
        self._users: dict[int, int] = {}
        self._changed = threading.Condition()
        self.table = RegionTable(())

    def add(self, spec: RegionSpec) -> None:
        """Raises ``UnsupportedError``, ``RegistrationError`` or its limit."""
        if spec.kind != "host":
            raise UnsupportedError(
                f"the host backend cannot register {spec.kind!r} memory: "
                "stage it through host memory or choose that device's backend",
                capability="memory",
                backend="host",
            )
        if spec.nbytes <= 0 or spec.address <= 0:
            raise RegistrationError(
                f"a region needs memory: got {spec.nbytes} bytes at {spec.address:#x}",
                backend="host",
            )
        with self._changed:
            if spec.region_id in self._entries:
                raise RegistrationError(
                    f"region {spec.region_id} is registered already", backend="host"
                )
            self._insert(spec)

    def _insert(self, spec: RegionSpec) -> None:
        slot = self._guard.acquire(spec.region_id)
        if slot is None:
            raise RegistrationLimitError(
                f"all {self._guard.slots} regions are in use: raise max_regions", backend="host"
            )
        self._entries[spec.region_id] = RegionEntry(
            spec.region_id, spec.address, spec.nbytes, access_bits(spec.access), slot
        )
        self._users[spec.region_id] = 0
        self.table = RegionTable(self._entries.values())

    def remove(self, region_id: int) -> None:
        """Withdraw a region and wait for the copies under way (microseconds).

        Raises ``RegistrationError`` when there is no such region and
        ``RegionBusyError`` in the case, believed impossible, that a copy does
        not end; the region is unreachable for new requests either way.
        """
        with self._changed:
            entry = self._entries.pop(region_id, None)
            if entry is None:
                raise RegistrationError(f"region {region_id} is not registered", backend="host")
            self._guard.release(entry.slot)
            self.table = RegionTable(self._entries.values())
            end = time.monotonic() + _WITHDRAW_TIMEOUT_S
            while self._users[region_id]:
                if not self._changed.wait(end - time.monotonic()):
                    raise RegionBusyError(
                        f"region {region_id} is still being copied", backend="host"
                    )
            del self._users[region_id]

    @contextmanager
    def using(self, region_ids: Sequence[int]) -> Iterator[None]:
        """Keep regions registered during one short copy.

        Raises ``StaleDescriptorError`` when one of them was withdrawn.
        """
        with self._changed:
            for region_id in region_ids:
                if region_id not in self._entries:
                    raise StaleDescriptorError(
                        f"region {region_id} was deregistered", backend="host"
                    )
            for region_id in region_ids:
                self._users[region_id] += 1
        try:
            yield
        finally:
            with self._changed:
                for region_id in region_ids:
                    self._users[region_id] -= 1
                self._changed.notify_all()

    def entries(self) -> tuple[RegionEntry, ...]:
        """What ``export`` publishes now."""
        with self._changed:
            return tuple(self._entries.values())
