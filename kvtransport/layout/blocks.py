"""Block tables, and the pairs of them that a transfer moves between.

A *pair* says which local bytes belong to which remote bytes.  Pairs are cheap:
they hold tables and index vectors, never one object per block.  Pairs of one
transfer that share their index vectors (the layers of a model) are merged once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from numpy.typing import ArrayLike

from kvtransport.errors import DescriptorError, OutOfBoundsError


class Memory(Protocol):
    """What block tables need to know of a local or remote region."""

    @property
    def region_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BlockTable:
    """``count`` blocks of ``block_nbytes``, the i-th at ``base + i * stride``.

    All sizes are bytes; ``base`` counts from the start of ``region``.  Blocks
    never overlap (``stride >= block_nbytes``) and all of them lie inside the
    region, so that a valid index is a valid address.  Raises
    ``OutOfBoundsError`` or ``DescriptorError`` otherwise.
    """

    region: Memory
    base: int
    stride: int
    block_nbytes: int
    count: int

    def __post_init__(self) -> None:
        for name in ("base", "stride", "block_nbytes", "count"):
            value = getattr(self, name)
            floor = 0 if name == "base" else 1
            if not isinstance(value, int) or value < floor:
                raise DescriptorError(
                    f"block table: {name} must be an integer >= {floor}, got {value!r}"
                )
        if self.stride < self.block_nbytes:
            raise DescriptorError(
                f"block table: stride {self.stride} is smaller than block_nbytes "
                f"{self.block_nbytes}; blocks would overlap"
            )
        end = self.base + (self.count - 1) * self.stride + self.block_nbytes
        if end > self.region.nbytes:
            raise OutOfBoundsError(
                f"block table: {self.count} blocks end at byte {end} of region "
                f"{self.region.name!r}, which has {self.region.nbytes}; lower count or base"
            )

    @property
    def dense(self) -> bool:
        """Whether consecutive blocks touch, so that runs of them can merge."""
        return self.stride == self.block_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class BlockPair:
    """Block ``local_index[i]`` of one table and ``remote_index[i]`` of another."""

    local: BlockTable
    remote: BlockTable
    local_index: ArrayLike
    remote_index: ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class RangePair:
    """Free-form ranges: n local offsets, n remote offsets and n (or one) lengths."""

    local: Memory
    remote: Memory
    local_offset: ArrayLike
    remote_offset: ArrayLike
    nbytes: ArrayLike


class Pair:
    """Constructors for the two kinds of pair.

    Index and offset vectors are one-dimensional integer arrays or sequences of
    equal length; they are checked when the transfer is planned, and must not
    change between the call and its return.
    """

    @staticmethod
    def blocks(
        local: BlockTable, remote: BlockTable, local_index: ArrayLike, remote_index: ArrayLike
    ) -> BlockPair:
        """Pair block ``local_index[i]`` of ``local`` with ``remote_index[i]`` of ``remote``."""
        return BlockPair(local, remote, local_index, remote_index)

    @staticmethod
    def ranges(
        local: Memory,
        local_offset: ArrayLike,
        remote: Memory,
        remote_offset: ArrayLike,
        nbytes: ArrayLike,
    ) -> RangePair:
        """Pair byte ranges; offsets in bytes from the start of each region."""
        return RangePair(local, remote, local_offset, remote_offset, nbytes)


AnyPair: TypeAlias = BlockPair | RangePair
