"""Region ids to addresses, with the checks that keep a descriptor inside.

The same table serves both sides: the initiator looks up a peer's export, the
target looks up its own registrations when it answers a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import DescriptorError, OutOfBoundsError, StaleDescriptorError
from kvtransport_backends.host._body import RegionEntry

Need = Literal["read", "write", "local"]
_BITS: dict[Need, int] = {"local": 0, "read": 1, "write": 2}


def access_bits(access: Iterable[Literal["read", "write"]]) -> int:
    """What peers may do, as carried in the export."""
    return sum(_BITS[word] for word in access)


class RegionTable:
    """An immutable set of regions; lookups are vectors in, vectors out."""

    def __init__(self, entries: Iterable[RegionEntry]) -> None:
        rows = sorted(entries, key=lambda entry: entry.region_id)
        self._ids = np.array([row.region_id for row in rows], np.int64)
        self._addresses = np.array([row.address for row in rows], np.uint64)
        self._nbytes = np.array([row.nbytes for row in rows], np.uint64)
        self._access = np.array([row.access for row in rows], np.int64)
        self._slots = np.array([row.slot for row in rows], np.intp)

    def locate(
        self,
        regions: NDArray[np.int64],
        offsets: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
        need: Need,
    ) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
        """Rows used (each once) and the address of every descriptor.

        Raises ``StaleDescriptorError`` (no such region), ``OutOfBoundsError``
        or ``DescriptorError`` (access).
        """
        index = self._rows(regions)
        limits = self._nbytes[index]
        # Written so that no sum can wrap around 2**64.
        outside = (offsets > limits) | (nbytes > limits - offsets) | (nbytes == 0)
        if outside.any():
            at = int(outside.argmax())
            raise OutOfBoundsError(
                f"descriptor {at} covers {int(nbytes[at])} bytes at {int(offsets[at])} of region "
                f"{int(regions[at])}, which has {int(limits[at])} bytes",
                backend="host",
            )
        used = np.flatnonzero(np.bincount(index, minlength=len(self._ids)))
        refused = (self._access[used] & _BITS[need]) != _BITS[need]
        if refused.any():
            region = int(self._ids[used[refused.argmax()]])
            raise DescriptorError(f"region {region} does not allow {need}", backend="host")
        return used, self._addresses[index] + offsets

    def _rows(self, regions: NDArray[np.int64]) -> NDArray[np.intp]:
        index = self._ids.searchsorted(regions)
        known = index < len(self._ids)
        known[known] = self._ids[index[known]] == regions[known]
        if not known.all():
            region = int(regions[known.argmin()])
            raise StaleDescriptorError(f"region {region} is not registered", backend="host")
        return index

    def region_ids(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """The ids of ``rows``, as ``locate`` returned them."""
        return self._ids[rows]

    def guard_slots(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The guard slots of ``rows``, in the same order as ``region_ids``."""
        return self._slots[rows]
