"""This agent's registered regions and what it tells peers about them."""

from __future__ import annotations

import mmap

import numpy as np

from kvtransport.backend import Blocks, RegionSpec
from kvtransport.errors import RegistrationError
from kvtransport_backends.nixl.body import Body, RegionEntry, encode
from kvtransport_backends.nixl.driver import DescriptorList, Driver, NativeAgent
from kvtransport_backends.nixl.native import map_native
from kvtransport_backends.nixl.regions import Placed, RegionBook
from kvtransport_backends.nixl.tables import Tables

_SCRATCH_ID = -1

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


class LocalRegions:
    """Registers memory with NIXL and describes it for peers."""

    def __init__(
        self, driver: Driver, agent: NativeAgent, plugin_handle: int, backend: str
    ) -> None:
        self._driver = driver
        self._agent = agent
        self._handles = [plugin_handle]
        self._backend = backend
        self._registered: dict[int, tuple[RegionSpec, DescriptorList, RegionEntry]] = {}
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
        """Register ``spec``; raises ``RegistrationError`` or ``UnsupportedError``."""
        device_id = Placed.mark(spec.region_id, spec.device)
        placed = Placed(spec.region_id, spec.kind, device_id, spec.address, spec.nbytes)
        row = np.array([[placed.address, placed.nbytes, placed.device_id]], np.uint64)
        descriptors = self._driver.region_list(placed.kind, row)
        with map_native(
            f"registering {placed.nbytes} bytes of {placed.kind} memory",
            backend=self._backend,
            otherwise=RegistrationError,
        ):
            self._agent.registerMem(descriptors, self._handles)
            native = self._agent.getLocalPartialMD(descriptors, False, self._handles)
        entry = RegionEntry(
            spec.region_id,
            spec.kind,
            device_id,
            spec.address,
            spec.nbytes,
            tuple(sorted(spec.access)),
            native,
        )
        self._registered[spec.region_id] = (spec, descriptors, entry)
        self.book.add(placed)

    def remove(self, region_id: int) -> None:
        """Withdraw a region; raises ``StaleDescriptorError`` or ``RegistrationError``."""
        self.book.get(region_id)
        self.tables.clear()  # they point into the registration
        _, descriptors, _ = self._registered[region_id]
        with map_native(
            f"deregistering region {region_id}", backend=self._backend, otherwise=RegistrationError
        ):
            self._agent.deregisterMem(descriptors, self._handles)
        self.book.remove(region_id)
        del self._registered[region_id]

    def export(self, plugin: str, name: str, contact: str) -> bytes:
        """This agent's body of metadata."""
        connection = self._agent.getLocalPartialMD(
            self._driver.empty_region_list(), True, self._handles
        )
        entries = tuple(entry for _, _, entry in self._registered.values())
        return encode(Body(plugin, name, connection, entries, contact))
