"""What host staging needs to be told: kinds, copies, size of the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks, Op, RegionSpec
from kvtransport.errors import ConfigError

Bytes: TypeAlias = NDArray[np.uint8]
Copy: TypeAlias = Callable[[RegionSpec, int, Bytes], None]
"""Copies between ``region`` at a byte offset and a host array; done when it returns."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """``kinds`` of device memory to stage, how to copy them, and the pool's size."""

    kinds: frozenset[str]
    to_device: Copy
    to_host: Copy
    slots: int = 8
    slot_bytes: int = 8 << 20
    wait_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.kinds or "host" in self.kinds:
            raise ConfigError(f"kinds must name device memory, got {sorted(self.kinds)}")
        for name in ("slots", "slot_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class StagingJob:
    """One staged post; ``slot`` is -1 while it waits for one."""

    ticket: int
    op: Op
    peer_id: int
    blocks: Blocks
    notify: bytes | None
    give_up_at: float
    slot: int = -1
