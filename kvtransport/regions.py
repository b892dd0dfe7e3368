"""The local regions of one agent."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from kvtransport import edge
from kvtransport.backend import Backend, RegionSpec
from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    RegionBusyError,
    RegistrationError,
    RegistrationLimitError,
    StaleDescriptorError,
    UnsupportedError,
)
from kvtransport.metadata import RegionEntry
from kvtransport.region import Buffer, Region, parse_access, resolve_buffer


class RegionTable:
    """Registers and deregisters under the declared limits; the agent holds its lock."""

    def __init__(
        self, backend: Backend, capabilities: Capabilities, release: Callable[[Region], None]
    ) -> None:
        self._backend = backend
        self._capabilities = capabilities
        self._release = release
        self._ids = count(1)
        self._generations: dict[str, int] = {}
        self._names: set[str] = set()
        self.by_id: dict[int, Region] = {}
        self.epoch = 0
        """Number of changes; tells an older export from a newer one."""
        self.frozen = False
        """Set at the first export when the backend cannot add regions later."""

    def __iter__(self) -> Iterator[Region]:
        return iter(list(self.by_id.values()))

    def register(
        self, buffer: Any, *, name: str | None, kind: str, device: int, access: str
    ) -> Region:
        """Register one buffer; nothing stays registered after an error."""
        rights = parse_access(access)
        found = resolve_buffer(buffer, kind)
        if "write" in rights and not found.writable:
            raise RegistrationError(
                "buffer is read-only, but access allows peers to write; pass access='r'"
            )
        self._check_limits(found, kind)
        region_id = next(self._ids)
        name = self._check_name(name if name is not None else f"region-{region_id}")
        region = Region(
            found,
            region_id=region_id,
            generation=self._generations.get(name, 0) + 1,
            name=name,
            kind=kind,
            device=device,
            access=rights,
            release=self._release,
        )
        spec = RegionSpec(
            region_id=region_id,
            address=found.address,
            nbytes=found.nbytes,
            kind=kind,
            device=device,
            access=rights,
            owner=found.owner,
        )
        edge.call(self._backend.register, spec)
        self.by_id[region_id] = region
        self._names.add(name)
        self._generations[name] = region.generation
        self.epoch += 1
        return region

    def _check_name(self, name: object) -> str:
        if not isinstance(name, str) or not 1 <= len(name) <= 256:
            raise RegistrationError(f"a region's name must have 1 to 256 characters, got {name!r}")
        if name in self._names:
            raise RegistrationError(
                f"a region named {name!r} is registered already; deregister it or choose another"
            )
        return name

    def _check_limits(self, buffer: Buffer, kind: str) -> None:
        limits = self._capabilities
        kinds = {k for pair in limits.memory for k in pair}
        if kind not in kinds:
            near = difflib.get_close_matches(kind, kinds, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; stage it through host memory"
            raise UnsupportedError(
                f"this backend cannot register {kind!r} memory, only {sorted(kinds)}{hint}",
                capability="memory",
            )
        if self.frozen:
            raise UnsupportedError(
                "this backend needs every region registered before the first metadata export",
                capability="dynamic_regions",
            )
        if limits.max_regions is not None and len(self.by_id) >= limits.max_regions:
            raise RegistrationLimitError(
                f"{len(self.by_id)} regions are registered and the backend's limit is "
                f"{limits.max_regions}; register fewer, larger regions"
            )
        if limits.max_region_bytes is not None and buffer.nbytes > limits.max_region_bytes:
            raise RegistrationLimitError(
                f"buffer has {buffer.nbytes} bytes and the backend's limit for one region is "
                f"{limits.max_region_bytes}; register it in pieces"
            )
        if buffer.address % limits.min_align:
            raise RegistrationError(
                f"buffer begins at {buffer.address:#x}, which is not a multiple of "
                f"{limits.min_align}; this backend needs that alignment"
            )

    def check_known(self, region: Region) -> None:
        """Raise ``StaleDescriptorError`` unless the region is registered here."""
        if self.by_id.get(region.region_id) is not region:
            raise StaleDescriptorError(
                f"region {region.name!r} (generation {region.generation}) is not registered here"
            )

    def deregister(self, region: Region) -> None:
        """Withdraw one region and let go of its buffer; refuses busy ones."""
        self.check_known(region)
        if region.busy:
            why = (
                f"{region.quarantined_bytes} bytes of it are quarantined for ever"
                if region.quarantined_bytes
                else f"{region.users} transfers use it; wait for them or pass drain_s"
            )
            raise RegionBusyError(f"region {region.name!r} cannot be deregistered: {why}")
        edge.call(self._backend.deregister, region.region_id)
        region.registered = False
        region.drop_buffer()
        del self.by_id[region.region_id]
        self._names.discard(region.name)
        self.epoch += 1

    def entries(self) -> tuple[RegionEntry, ...]:
        """What metadata says about the regions."""
        return tuple(
            RegionEntry(r.region_id, r.generation, r.name, r.nbytes, r.kind, r.device, r.access)
            for r in self.by_id.values()
        )
