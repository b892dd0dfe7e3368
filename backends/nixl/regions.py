"""The regions of one agent, ours or a peer's, as NIXL knows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import StaleDescriptorError


@dataclass(frozen=True, slots=True)
class Placed:
    """A region as NIXL knows it; ``device_id`` is part of NIXL's address.

    NIXL finds a registration by address and device id, and takes the first
    that covers a descriptor.  Below that, every plugin uses the device id's
    lower 32 bits only.  The upper 32 therefore hold a region's id, so that no
    two registrations of an agent are alike to NIXL: neither overlapping ones
    nor one that came at the address of another that went.
    """

    region_id: int
    kind: str
    device_id: int
    address: int
    nbytes: int

    @staticmethod
    def mark(region_id: int, device: int) -> int:
        """The device id under which NIXL knows a region of ``device``."""
        return (region_id & 0xFFFFFFFF) << 32 | device


class RegionBook:
    """Regions by id.  ``version`` changes with every change."""

    def __init__(self) -> None:
        self._placed: dict[int, Placed] = {}
        self.version = 0

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._placed

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._placed.values())

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, placed: Placed) -> None:
        self._placed[placed.region_id] = placed
        self.version += 1

    def remove(self, region_id: int) -> Placed:
        placed = self._placed.pop(region_id)
        self.version += 1
        return placed

    def get(self, region_id: int) -> Placed:
        """Raises ``StaleDescriptorError`` for an id that is not registered now."""
        placed = self._placed.get(region_id)
        if placed is None:
            raise StaleDescriptorError(f"region {region_id} is not registered any more")
        return placed

    def distinct(self, regions: NDArray[np.int64]) -> tuple[Placed, ...]:
        """The regions that occur in ``regions``, each once, by id.

        Raises ``StaleDescriptorError``.
        """
        first = regions[0]
        if len(regions) == 1 or (regions == first).all():
            return (self.get(int(first)),)
        return tuple(self.get(region_id) for region_id in np.unique(regions).tolist())

    def check(self, found: tuple[Placed, ...]) -> None:
        """Raise ``StaleDescriptorError`` unless all of ``found`` are still here."""
        for placed in found:
            if self._placed.get(placed.region_id) is not placed:
                raise StaleDescriptorError(f"region {placed.region_id} is not registered any more")
