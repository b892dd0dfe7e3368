"""What a backend can do, declared once as data.

The conformance suite tests each declaration, the absent ones too: a capability
that is declared absent must be refused cleanly.  Reading capabilities never
touches hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Ops = frozenset[Literal["read", "write"]]
MemoryPair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declared behaviour of a backend under one configuration.

    ``None`` for a limit means "no limit known".  ``memory`` holds the pairs
    (local kind, remote kind) between which data can move directly.
    """

    ops: Ops
    memory: frozenset[MemoryPair]
    notify: Literal["inline", "separate", "none"] = "none"
    notify_after_data: bool = False
    completion: Literal["local", "remote_visible"] = "remote_visible"
    ordering: Literal["none", "per_peer"] = "none"
    cancel: Literal["none", "drain", "hard"] = "none"
    failure_detection: Literal["none", "on_use", "keepalive"] = "none"
    detection_bound_s: float | None = None
    threading: Literal["single", "serialized", "concurrent"] = "serialized"
    progress: Literal["manual", "auto"] = "manual"
    target_enforces: frozenset[Literal["bounds", "access", "stale_key"]] = frozenset()
    dynamic_regions: bool = True
    min_align: int = 1
    max_region_bytes: int | None = None
    max_regions: int | None = None
    max_descriptors: int | None = None
    max_transfer_bytes: int | None = None
    max_notify_bytes: int = 0
    max_in_flight: int | None = None
    path_evidence: tuple[str, ...] = field(default=())

    @property
    def can_read(self) -> bool:
        return "read" in self.ops

    @property
    def can_write(self) -> bool:
        return "write" in self.ops
