"""Loading of what is under test; only worker and peer processes import this."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from kvtransport.agent import Agent
from kvtransport.backend import API_VERSION, Backend, BackendInfo
from kvtransport.config import build_config
from kvtransport.errors import ConfigError
from kvtransport.registry import find_backend, load_info
from kvtransport_conformance import flags
from kvtransport_conformance.tap import Tap
from kvtransport_conformance.target import MemoryKit, Target, load_object, load_target


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target as seen by one side."""

    target: Target
    info: BackendInfo
    backend: type[Backend]
    options: Mapping[str, Any]

    def kit(self, kind: str = "") -> MemoryKit:
        """Return the kit for ``kind``, by default the target's first."""
        return self.target.kit(kind) if kind else self.target.memory[0]

    def config(self, overrides: Mapping[str, Any] | None = None) -> Any:
        return build_config(self.info, {**self.options, **(overrides or {})})


def load(wire: Mapping[str, Any], *, peer: bool) -> Loaded:
    """Load the target; ``peer`` adds its options for the peer's side."""
    target = load_target(wire)
    info, backend = _backend(target.backend)
    options = {**target.config, **(target.peer_config if peer else {})}
    return Loaded(target, info, backend, options)


def _backend(reference: str) -> tuple[BackendInfo, type[Backend]]:
    if ":" not in reference:
        info = find_backend(reference)
        return info, load_info(info)
    found = load_object(reference)
    if isinstance(found, BackendInfo):
        return found, load_info(found)
    if isinstance(found, type) and issubclass(found, Backend):
        return found.info, found
    raise ConfigError(f"{reference} is neither a BackendInfo nor a Backend class")


def open_agent(
    loaded: Loaded,
    name: str,
    *,
    fingerprint: bytes = b"",
    narrow: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    faults: Mapping[str, Any] | None = None,
    wire: str = "",
    options: Mapping[str, Any] | None = None,
) -> tuple[Agent, Tap]:
    """Open an agent over a tapped backend; ``faults`` puts the fault layer above it."""
    narrow = {
        key: frozenset(value) if isinstance(value, list) else value
        for key, value in (narrow or {}).items()
    }
    tap = Tap(loaded.backend(), narrow)
    if wire:
        tap.info = replace(tap.info, wire=wire)  # type: ignore[misc]  # per instance on purpose
    layer: Backend = tap
    if faults is not None:
        from kvtransport_conformance.faults import faulty

        layer = faulty(tap, faults)
    agent_class = cast("type[Agent]", load_object(loaded.target.agent))
    agent = agent_class(
        backend=layer,
        name=name,
        config=loaded.config(config),
        fingerprint=fingerprint,
        options=options,
    )
    return agent, tap


def facts(loaded: Loaded) -> dict[str, Any]:
    """What the report says about backend and environment, before anything is opened."""
    config = loaded.config()
    probe = loaded.backend.probe(config)
    distribution = _distribution(loaded)
    return {
        "backend": {
            "name": loaded.info.name,
            "summary": loaded.info.summary,
            "dist": distribution[0],
            "version": distribution[1],
            "spi": loaded.info.api_version,
            "suite_spi": API_VERSION,
            "wire": loaded.info.wire,
            "layers": [],
            "record_digest": distribution[2],
            "config": {key: str(value) for key, value in sorted(loaded.options.items())},
        },
        "probe": {
            "available": probe.available,
            "reason": probe.reason,
            "hint": probe.hint or loaded.info.install_hint,
            "details": {str(key): str(value) for key, value in probe.details.items()},
        },
        "capabilities": flags.declared_json(loaded.backend.capabilities(config)),
        "implementation": {
            "organization": loaded.target.organization,
            "project": loaded.target.project or distribution[0],
            "url": loaded.target.url,
            "contact": list(loaded.target.contact),
        },
        "memory": [
            {"kind": kit.kind, **{str(k): str(v) for k, v in kit.device_info().items()}}
            for kit in loaded.target.memory
        ],
        "python": platform.python_version(),
    }


def _distribution(loaded: Loaded) -> tuple[str, str, str]:
    """Name and version of the package that holds the backend, and a digest of its code."""
    module = loaded.backend.__module__
    owners = metadata.packages_distributions().get(module.split(".")[0], [])
    for entry in metadata.entry_points(group="kvtransport.backends"):
        if entry.name == loaded.info.name and entry.dist is not None:
            owners = [entry.dist.name, *owners]
    digest = _source_digest(loaded.backend)
    if not owners:
        return module, "unknown", digest
    return owners[0], metadata.version(owners[0]), digest


def _source_digest(backend: type[Backend]) -> str:
    """SHA-256 over the Python files beside the backend's module."""
    try:
        own = Path(inspect.getfile(backend))
    except (TypeError, OSError):
        return "unknown"
    total = hashlib.sha256()
    files = sorted(own.parent.glob("*.py")) if own.stem != "__init__" else [own]
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"sha256:{total.hexdigest()}"
