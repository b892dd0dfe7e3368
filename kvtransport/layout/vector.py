"""Index and offset vectors, checked once."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import DescriptorError, OutOfBoundsError

Index: TypeAlias = NDArray[np.int64]


class Vector:
    """Non-negative int64 ``values`` with what planning needs to know of them.

    ``rising`` means strictly increasing, hence without duplicates; ``low`` and
    ``high`` are the extremes, 0 and -1 when there are no values.
    """

    __slots__ = ("high", "low", "rising", "values")

    def __init__(self, values: Index) -> None:
        self.values = values
        if not len(values):
            self.rising, self.low, self.high = True, 0, -1
            return
        # Compared, not subtracted: differences of int64 extremes wrap.
        self.rising = bool((values[1:] > values[:-1]).all())
        if self.rising:
            self.low, self.high = int(values[0]), int(values[-1])
        else:
            self.low, self.high = int(values.min()), int(values.max())

    def __len__(self) -> int:
        return len(self.values)

    def has_duplicates(self) -> bool:
        """Whether any value occurs twice."""
        if self.rising:
            return False
        values = self.values
        if self.high < 16 * len(values):
            seen = np.zeros(self.high + 1, bool)
            seen[values] = True
            return int(np.count_nonzero(seen)) != len(values)
        ordered = np.sort(values)
        return bool((ordered[1:] == ordered[:-1]).any())


def as_vector(values: Any, what: str) -> Vector:
    """Check ``values``, one-dimensional integers from 0 to 2^63 - 1.

    Raises ``DescriptorError`` for anything but such integers and
    ``OutOfBoundsError`` for values outside that range; ``what`` names them.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise DescriptorError(f"{what} must be a vector of integers: {error}") from error
    if array.size == 0 and array.ndim <= 1:
        return Vector(np.empty(0, np.int64))
    if array.ndim != 1:
        raise DescriptorError(f"{what} must be one-dimensional, got shape {array.shape}")
    kind = array.dtype.kind
    if kind not in "iu":
        # numpy turns a list that holds integers beyond int64 into objects or floats.
        if kind in "Of" and all(type(v) is int for v in values):
            raise _outside(what)
        raise DescriptorError(f"{what} must hold integers, got dtype {array.dtype}")
    if array.dtype.itemsize == 8 and kind == "u" and int(array.max()) >= 1 << 63:
        raise _outside(what)
    vector = Vector(array.astype(np.int64, copy=False))
    if vector.low < 0:
        raise _outside(what)
    return vector


def _outside(what: str) -> OutOfBoundsError:
    return OutOfBoundsError(f"{what} holds a value outside 0 .. 2^63 - 1")
