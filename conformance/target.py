"""What is under test: a backend, its configuration, memory kits and optional hooks.

A host-memory backend needs no code at all: ``Target(backend="acme")``.  A device
backend adds one ``MemoryKit``.  Hooks are optional; a missing hook turns the
checks that need it into ``NOT_VERIFIED``, never into a pass.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from kvtransport.errors import ConfigError


class MemoryKit:
    """Oracle access to one kind of memory, never through the transport.

    Subclass it for device memory: ``alloc``, ``fill``, ``dump`` and ``free`` are
    the whole job.  ``alloc`` returns any object that ``Agent.register`` takes:
    the buffer protocol, or ``data_ptr()`` and ``nbytes``.  ``device_info`` names
    the hardware and its driver; without a ``driver`` the device counts as
    simulated and the evidence stays at tier E1.
    """

    kind: ClassVar[str] = "host"
    device: ClassVar[int] = 0

    def alloc(self, nbytes: int) -> Any:
        raise NotImplementedError

    def fill(self, buf: Any, data: bytes) -> None:
        """Copy ``data`` to the beginning of ``buf`` and wait until it is there."""
        raise NotImplementedError

    def dump(self, buf: Any) -> bytes:
        """Return all bytes of ``buf`` as the device sees them."""
        raise NotImplementedError

    def free(self, buf: Any) -> None:
        raise NotImplementedError

    def device_info(self) -> Mapping[str, str]:
        """Return ``name`` and ``driver`` of the device, as its runtime reports them."""
        return {}


class HostMemory(MemoryKit):
    """Page-aligned host memory in numpy arrays."""

    def alloc(self, nbytes: int) -> Any:
        page = 4096
        raw = np.zeros(nbytes + page, np.uint8)
        skip = -raw.ctypes.data % page
        return raw[skip : skip + nbytes]

    def fill(self, buf: Any, data: bytes) -> None:
        buf[: len(data)] = np.frombuffer(data, np.uint8)

    def dump(self, buf: Any) -> bytes:
        return bytes(memoryview(buf))

    def free(self, buf: Any) -> None:
        """Nothing to do: the array dies with its last reference."""


class SimulatedMemory(HostMemory):
    """Host memory under a device's name; every artefact says "simulated"."""

    kind = "simulated"

    def device_info(self) -> Mapping[str, str]:
        return {"name": f"simulated-{self.kind}"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A backend under test.

    ``backend`` is a registered name or ``"module:attribute"`` naming a
    ``BackendInfo`` or ``Backend`` class.  ``config`` holds the backend's options
    for both sides; ``peer_config`` overrides them on the peer's side.  The first
    memory kit is the one that data checks use.  Subclass to add the hooks.
    """

    backend: str
    config: Mapping[str, Any] = field(default_factory=dict)
    peer_config: Mapping[str, Any] = field(default_factory=dict)
    memory: Sequence[MemoryKit] = field(default_factory=lambda: (HostMemory(),))
    agent: str = "kvtransport.agent:Agent"
    organization: str = ""
    project: str = ""
    url: str = ""
    contact: Sequence[str] = ()

    def kit(self, kind: str) -> MemoryKit:
        """Return the kit for ``kind``; raises ``ConfigError`` without one."""
        for kit in self.memory:
            if kit.kind == kind:
                return kit
        raise ConfigError(f"target has no memory kit for kind {kind!r}: add one to memory=[...]")

    # Optional hooks.  None means "this target has no such hook".
    def inject(self, fault: str) -> bool | None:
        """Cause ``fault`` ("link_down", "drop_ack", "heal"); return True when done."""

    def counters(self) -> Mapping[str, int] | None:
        """NIC or driver counters, beside those of ``Backend.counters``."""

    def snapshot(self) -> Mapping[str, int] | None:
        """Count device resources in use: device bytes, driver regions, queue pairs."""


_ABOUT = ("organization", "project", "url", "contact")


def load_object(reference: str) -> Any:
    """Import ``module:attribute`` or ``path/to/file.py:attribute``.

    Raises ``ConfigError`` naming what is missing.
    """
    location, separator, attribute = reference.rpartition(":")
    if not separator or not location or not attribute:
        raise ConfigError(f"reference {reference!r} must be 'module:attribute' or 'file.py:name'")
    module = _from_file(Path(location)) if location.endswith(".py") else _by_name(location)
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(f"{location} has no attribute {attribute!r}") from error
    return found


def _by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {name!r} (from {error.name}): is it installed?"
        ) from error


def _from_file(path: Path) -> ModuleType:
    name = f"_kvt_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"no Python file at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TARGETS_GROUP = "kvtransport.conformance_targets"
"""Entry points by which a package offers a Target for its backend's name."""


def find_target_reference(backend: str) -> str:
    """The reference of the installed Target for ``backend``, or ""; imports nothing of it."""
    from importlib.metadata import entry_points

    found = {point.value for point in entry_points(group=TARGETS_GROUP) if point.name == backend}
    if len(found) > 1:
        raise ConfigError(f"several packages offer a target for {backend!r}: {sorted(found)}")
    return next(iter(found), "")


def load_target(wire: Mapping[str, Any]) -> Target:
    """Build the target that ``Target`` reference or plain fields describe."""
    if wire.get("ref"):
        target = load_object(wire["ref"])
        if not isinstance(target, Target):
            raise ConfigError(f"{wire['ref']} is {type(target).__name__}, not a Target")
        return replace(
            target,
            config={**target.config, **wire.get("config", {})},
            peer_config={**target.peer_config, **wire.get("peer_config", {})},
        )
    return Target(
        backend=wire["backend"],
        config=wire.get("config", {}),
        peer_config=wire.get("peer_config", {}),
        agent=wire.get("agent", "kvtransport.agent:Agent"),
        **{key: wire[key] for key in _ABOUT if key in wire},
    )


def target_wire(target: Target) -> dict[str, Any]:
    """Describe ``target`` so that another process can load it.

    A target with its own memory kits or hooks must be a module-level name, since
    the other process imports it; raises ``ConfigError`` when it is not.
    """
    if type(target) is Target and all(type(kit) is HostMemory for kit in target.memory):
        return {
            "backend": target.backend,
            "config": dict(target.config),
            "peer_config": dict(target.peer_config),
            "agent": target.agent,
            **{key: getattr(target, key) for key in _ABOUT},
        }
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()):
            if value is target:
                location = module.__file__ if name.startswith(("_", "test")) else name
                return {"ref": f"{location}:{attribute}"}
    raise ConfigError("a Target with memory kits or hooks must be a module-level variable")
