"""Saboteurs of hooks and device memory: whole targets, because a backend alone has neither.

The device is pretended: host memory under another name, with a driver made up so
that the checks of real devices run.  No report is ever made from these.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from kvtransport import registry
from kvtransport.backend import Blocks, Op, RegionSpec
from kvtransport.capabilities import Capabilities
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur_target
from kvtransport_conformance.target import HostMemory, MemoryKit, Target

PRETENDED = "pretended"


class PretendedMemory(HostMemory):
    """Host memory that claims to be a real device's."""

    kind = PRETENDED

    def device_info(self) -> Mapping[str, str]:
        return {"name": "pretended", "driver": "0"}


class PretendedDevice(BrokenBackend):
    """The host backend under the pretended device's name."""

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        kinds = ("host", PRETENDED)
        pairs = frozenset((one, other) for one in kinds for other in kinds)
        return replace(registry.load("host").capabilities(config), memory=pairs)

    def register(self, region: RegionSpec) -> None:
        self.inner.register(replace(region, kind="host"))


class LosesDeviceContext(PretendedDevice):
    """Works only on the thread that opened the device."""

    def open(self, name: str, config: Any) -> None:
        self._thread = threading.get_ident()
        self.inner.open(name, config)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("no current context")
        self.inner.post(ticket, op, peer_id, blocks, notify)


class StaleCacheMemory(PretendedMemory):
    """A device whose own view of its memory lags behind at the end."""

    def dump(self, buf: Any) -> bytes:
        data = bytearray(super().dump(buf))
        if len(data) == 1 << 20:
            data[-64:] = b"\xee" * 64
        return bytes(data)


@dataclass(frozen=True, kw_only=True)
class LeakyHooks(Target):
    """Counts more device bytes at every look."""

    seen: Any = field(default_factory=lambda: count(1))

    def snapshot(self) -> Mapping[str, int]:
        return {"device_bytes": next(self.seen)}


class IdleFault(Target):
    """Claims to have broken the network and did not."""

    def inject(self, fault: str) -> bool:
        return bool(fault)


_HERE = f"{__name__}:"
_BACKEND = f"{_HERE}PretendedDevice"


def _kits(first: MemoryKit) -> tuple[MemoryKit, ...]:
    return (first, HostMemory())


LosesContextTarget = Target(backend=f"{_HERE}LosesDeviceContext", memory=_kits(PretendedMemory()))
StaleCacheTarget = Target(backend=_BACKEND, memory=_kits(StaleCacheMemory()))
LeakyDeviceTarget = LeakyHooks(backend="host")
IdleFaultTarget = IdleFault(backend="host")

saboteur_target(
    f"{_HERE}LosesContextTarget",
    "Works on one thread of a device only.",
    "CON-02",
    "CON-07",
    "CON-10",
    "REG-11",
)
saboteur_target(
    f"{_HERE}StaleCacheTarget",
    "The device itself does not see the last bytes.",
    "CMP-09",
    "CON-01",
    "DEV-01",
    "INT-02",
    "ORD-02",
    "RD-03",
    "RD-05",
    "REG-11",
    "WR-03",
    "WR-05",
)
saboteur_target(f"{_HERE}LeakyDeviceTarget", "Device bytes grow with every use.", "TD-05")
saboteur_target(
    f"{_HERE}IdleFaultTarget", "Transfers succeed although the network is down.", "PD-06"
)
