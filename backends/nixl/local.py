"""This agent's registered regions and what it tells peers about them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Registration:
    """One NIXL registration and the regions that it serves."""

    device_id: int
    descriptors: DescriptorList
    native: bytes
    users: dict[int, RegionSpec] = field(default_factory=dict)

    def entry(self, spec: RegionSpec) -> RegionEntry:
        return RegionEntry(
            spec.region_id,
            spec.kind,
            self.device_id,
            spec.address,
            spec.nbytes,
            tuple(sorted(spec.access)),
            self.native,
        )


class LocalRegions:
    """Registers memory with NIXL and describes it for peers."""

    def __init__(
        self, driver: Driver, agent: NativeAgent, plugin_handle: int, backend: str
    ) -> None:
        self._driver = driver
        self._agent = agent
        self._handles = [plugin_handle]
        self._backend = backend
        self._registrations: dict[tuple[str, int, int, int], _Registration] = {}
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

        Regions of exactly one range share a NIXL registration: LIBFABRIC over
        TCP can't register an address twice, and pinning memory once is cheaper.
        """
        key = (spec.kind, spec.device, spec.address, spec.nbytes)
        shared = self._registrations.get(key)
        if shared is None:
            shared = self._registrations[key] = self._register(spec)
        shared.users[spec.region_id] = spec
        self.book.add(
            Placed(spec.region_id, spec.kind, shared.device_id, spec.address, spec.nbytes)
        )

    def remove(self, region_id: int) -> None:
        """Withdraw a region; raises ``StaleDescriptorError`` or ``RegistrationError``."""
        self.book.get(region_id)
        self.tables.clear()  # they point into the registration
        key, shared = next(
            item for item in self._registrations.items() if region_id in item[1].users
        )
        if len(shared.users) == 1:
            with map_native(
                f"deregistering region {region_id}",
                backend=self._backend,
                otherwise=RegistrationError,
            ):
                self._agent.deregisterMem(shared.descriptors, self._handles)
            del self._registrations[key]
        del shared.users[region_id]
        self.book.remove(region_id)

    def export(self, plugin: str, name: str, contact: str) -> bytes:
        """This agent's body of metadata."""
        connection = self._agent.getLocalPartialMD(
            self._driver.empty_region_list(), True, self._handles
        )
        entries = [
            shared.entry(spec)
            for shared in self._registrations.values()
            for spec in shared.users.values()
        ]
        return encode(Body(plugin, name, connection, tuple(entries), contact))

    def _register(self, spec: RegionSpec) -> _Registration:
        device_id = Placed.mark(spec.region_id, spec.device)
        row = np.array([[spec.address, spec.nbytes, device_id]], np.uint64)
        descriptors = self._driver.region_list(spec.kind, row)
        with map_native(
            f"registering {spec.nbytes} bytes of {spec.kind} memory",
            backend=self._backend,
            otherwise=RegistrationError,
        ):
            self._agent.registerMem(descriptors, self._handles)
            native = self._agent.getLocalPartialMD(descriptors, False, self._handles)
        return _Registration(device_id, descriptors, native)
