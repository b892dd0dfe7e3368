"""How real the hardware was: a tier computed from what was seen, never typed in.

===  ==================================================================
E0   nothing moved between two processes
E1   the device is simulated or emulated
E2   two processes, real data path, no device and no NIC involved
E3   a real device or NIC, one host, and a counter or driver that proves it
E4   as E3, between two hosts
===  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

# vLLM's CPU platform, for one, preloads these into the processes it starts.
_HARMLESS = ("libtcmalloc", "libjemalloc", "libmimalloc", "libiomp5", "libgomp", "libomp")

MODULES: Mapping[str, str] = MappingProxyType(
    {"cuda": "nvidia", "rocm": "amdgpu", "neuron": "neuron"}
)
"""Kernel module of each kind of device; a kit of another kind names its own as ``module``."""

_TEXT = {
    "E0": "nothing verified",
    "E1": "simulated or emulated device",
    "E2": "host memory, software path",
    "E3": "real device, one host",
    "E4": "real device, two hosts",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """``device`` names what was under test: a device, "emulated ..." or "host memory"."""

    tier: str
    why: str
    hosts: int
    devices: tuple[dict[str, str], ...] = ()
    nics: tuple[str, ...] = ()
    emulated: bool = False

    @property
    def text(self) -> str:
        return _TEXT[self.tier]


def judge(facts: Mapping[str, Any], moved: int, counters: Mapping[str, int]) -> Evidence:
    """Compute the tier from both processes' identities, memory kits and counters."""
    if not facts or not moved:
        return Evidence("E0", "no byte moved between two processes", 1)
    mine, theirs = facts["process"], facts["peer_process"]
    hosts = 1 if mine["boot_id"] == theirs["boot_id"] else 2
    devices = tuple(
        _corroborated(kit, mine["modules"]) for kit in facts["memory"] if kit["kind"] != "host"
    )
    nics = _nics_used(facts, moved, counters)
    fakes = _fakes(facts, devices)
    shape = f"2 processes, {_place(mine, theirs, hosts)}"
    if fakes:
        return Evidence("E1", f"{shape}; {'; '.join(fakes)}", hosts, devices, nics, emulated=True)
    real = [kit for kit in devices if kit.get("driver")]
    proofs = [
        f"{kit['kind']} device {kit.get('name', '?')}, driver {kit['driver']}" for kit in real
    ]
    proofs += [f"NIC {nic} present and its counters moved" for nic in nics]
    if not proofs:
        why = f"{shape}; host memory only, no device and no NIC took part"
        return Evidence("E2", why, hosts, devices, nics)
    return Evidence(
        "E4" if hosts > 1 else "E3", f"{shape}; {'; '.join(proofs)}", hosts, devices, nics
    )


def _corroborated(kit: Mapping[str, str], modules: Sequence[str]) -> dict[str, str]:
    """The kit's facts; its driver only counts when the kernel has that driver's module."""
    found = dict(kit)
    module = MODULES.get(kit["kind"]) or kit.get("module", "")
    if module not in modules:
        found.pop("driver", None)
    return found


def _place(mine: Mapping[str, Any], theirs: Mapping[str, Any], hosts: int) -> str:
    if hosts > 1:
        return f"hosts {mine['host']} and {theirs['host']}"
    if mine["net_namespace"] != theirs["net_namespace"]:
        return "1 host, two network namespaces"
    return "1 host"


def _fakes(facts: Mapping[str, Any], devices: Sequence[Mapping[str, str]]) -> list[str]:
    """Everything that makes the device less than real; any one of them decides."""
    found = [
        f"device {kit.get('name', kit['kind'])} has no driver: simulated"
        for kit in devices
        if not kit.get("driver")
    ]
    for side in ("process", "peer_process"):
        if shims := _shims(facts[side]["preload"]):
            found.append(f"LD_PRELOAD is set ({shims}): emulated")
            break
    details = facts["probe"]["details"]
    if str(details.get("emulated", "")).lower() not in {"", "no", "false", "0"}:
        found.append(f"the backend's probe says emulated: {details['emulated']}")
    return found


def _shims(preload: str) -> str:
    """What is preloaded besides memory allocators and OpenMP, which imitate no device."""
    names = [PurePath(library).name for library in preload.replace(":", " ").split()]
    return " ".join(name for name in names if not name.startswith(_HARMLESS))


def _nics_used(
    facts: Mapping[str, Any], moved: int, counters: Mapping[str, int]
) -> tuple[str, ...]:
    """NICs count only when they exist in sysfs and hardware counters moved by the payload."""
    nics = tuple(facts["process"]["nics"])
    hardware = [
        value for name, value in counters.items() if name.startswith(("hw.", "rdma_", "nic."))
    ]
    return nics if nics and sum(hardware) >= moved else ()
