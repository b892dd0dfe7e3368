"""This agent's registered regions and what it tells peers about them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from kvtransport.backend import Blocks, RegionSpec
from kvtransport.errors import RegistrationError
from kvtransport_backends.nixl.body import Body, RegionEntry, encode
from kvtransport_backends.nixl.driver import DescriptorList, Driver, NativeAgent
from kvtransport_backends.nixl.native import map_native
from kvtransport_backends.nixl.regions import Placed, RegionBook
from kvtransport_backends.nixl.tables import Tables

_SCRATCH_ID = -1
_SCRATCH_DEVICE = (1 << 31) - 1

SCRATCH_BLOCK = Blocks(
    np.array([_SCRATCH_ID]),
    np.zeros(1, np.uint64),
    np.array([_SCRATCH_ID]),
    np.zeros(1, np.uint64),
    np.ones(1, np.uint64),
)
"""One byte of the peer's scratch page into ours.

NIXL sends a notification only behind a transfer, or by a call that can block
for 40 s when the peer is dead; every agent therefore exports one page that
means nothing.
"""

_Key = tuple[str, int, int, int]


@dataclass(slots=True)
class _Registration:
    """One NIXL registration and how many regions share it."""

    descriptors: DescriptorList
    native: bytes
    users: int = 1


class LocalRegions:
    """Registers memory with NIXL and describes it for peers."""

    def __init__(
        self, driver: Driver, agent: NativeAgent, plugin_handle: int, backend: str
    ) -> None:
        self._driver = driver
        self._agent = agent
        self._handle = plugin_handle
        self._backend = backend
        self._registrations: dict[_Key, _Registration] = {}
        self._specs: dict[int, RegionSpec] = {}
        self.book = RegionBook()
        self.tables = Tables(driver, agent, plugin_handle, "")
        self._add_scratch()

    def _add_scratch(self) -> None:
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self.add(
            RegionSpec(
                _SCRATCH_ID,
                page.ctypes.data,
                page.nbytes,
                access=frozenset({"read"}),
                owner=page,
            )
        )

    def add(self, spec: RegionSpec) -> None:
        """Register ``spec``; raises ``RegistrationError`` or ``UnsupportedError``.

        Several registrations of one device range share NIXL's; ranges that
        overlap otherwise are refused, because NIXL looks memory up by address
        and could pick either.
        """
        # Host memory has no device, so the id is free to keep regions apart.
        device_id = spec.device
        if spec.kind == "host":
            device_id = _SCRATCH_DEVICE if spec.region_id == _SCRATCH_ID else spec.region_id
        placed = Placed(spec.region_id, spec.kind, device_id, spec.address, spec.nbytes)
        shared = self._registrations.get(_key(placed))
        if shared is not None:
            shared.users += 1
        else:
            self._refuse_overlap(placed)
            self._registrations[_key(placed)] = self._register(placed)
        self._specs[spec.region_id] = spec
        self.book.add(placed)

    def remove(self, region_id: int) -> None:
        placed = self.book.get(region_id)
        self.tables.clear()  # they point into the registration
        shared = self._registrations[_key(placed)]
        if shared.users == 1:
            with map_native(
                f"deregistering region {region_id}",
                backend=self._backend,
                otherwise=RegistrationError,
            ):
                self._agent.deregisterMem(shared.descriptors, [self._handle])
            del self._registrations[_key(placed)]
        shared.users -= 1
        self.book.remove(region_id)
        del self._specs[region_id]

    def export(self, plugin: str, name: str, contact: str) -> bytes:
        connection = self._agent.getLocalPartialMD(
            self._driver.empty_region_list(), True, [self._handle]
        )
        entries = tuple(self._entry(placed) for placed in self.book)
        return encode(Body(plugin, name, connection, entries, contact))

    def _entry(self, placed: Placed) -> RegionEntry:
        spec = self._specs[placed.region_id]
        return RegionEntry(
            placed.region_id,
            placed.kind,
            placed.device_id,
            placed.address,
            placed.nbytes,
            tuple(sorted(spec.access)),
            self._registrations[_key(placed)].native,
        )

    def _register(self, placed: Placed) -> _Registration:
        row = np.array([[placed.address, placed.nbytes, placed.device_id]], np.uint64)
        descriptors = self._driver.region_list(placed.kind, row)
        with map_native(
            f"registering {placed.nbytes} bytes of {placed.kind} memory",
            backend=self._backend,
            otherwise=RegistrationError,
        ):
            self._agent.registerMem(descriptors, [self._handle])
            native = self._agent.getLocalPartialMD(descriptors, False, [self._handle])
        return _Registration(descriptors, native)

    def _refuse_overlap(self, placed: Placed) -> None:
        for other in self.book:
            if placed.overlaps(other):
                raise RegistrationError(
                    f"address: overlaps region {other.region_id} on {other.kind} device"
                    f" {other.device_id}; register the whole range once",
                    backend=self._backend,
                )


def _key(placed: Placed) -> _Key:
    return placed.kind, placed.device_id, placed.address, placed.nbytes
