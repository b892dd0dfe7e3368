"""Planning: from pairs of tables to the descriptors that a backend gets.

Everything is checked here, before anything is posted: regions and peers are
current, indices inside their tables, ranges inside their regions (without
wrapping), access allowed, destinations free of overlap, the declared limits
kept.  The work is proportional to tables plus runs, not to tables times blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvtransport.backend import Blocks, Op
from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    DescriptorError,
    LengthMismatchError,
    OutOfBoundsError,
    StaleDescriptorError,
    UnsupportedError,
)
from kvtransport.layout.blocks import (
    AnyPair,
    BlockPair,
    BlockTable,
    Index,
    Memory,
    RangePair,
    as_vector,
)
from kvtransport.layout.merge import Runs, index_runs, range_runs, single_blocks
from kvtransport.layout.overlap import Footprint, find_overlap, has_duplicates
from kvtransport.layout.short import (
    Row,
    merge_rows,
    overlapping,
    short_blocks,
    short_ranges,
)
from kvtransport.layout.split import split_blocks
from kvtransport.peer import Peer, RemoteRegion
from kvtransport.region import Region

_FEW_PAIRS = 8
"""Up to so many pairs, short ones are worth handling without numpy."""

EMPTY = Blocks(
    local_region=np.empty(0, np.int64),
    local_offset=np.empty(0, np.uint64),
    remote_region=np.empty(0, np.int64),
    remote_offset=np.empty(0, np.uint64),
    nbytes=np.empty(0, np.uint64),
)
"""What is posted for a message without data."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked transfer, ready to post; ``parts`` respect the backend's limits."""

    op: Op
    peer: Peer
    regions: tuple[Region, ...]
    remote_regions: tuple[RemoteRegion, ...]
    parts: tuple[Blocks, ...]
    nbytes: int
    descriptors: int

    def check_current(self) -> None:
        """Raise unless every region and the peer are still what was planned for."""
        self.peer.check_usable()
        for region in self.regions:
            if not region.registered:
                raise _stale_local(region)
        for remote in self.remote_regions:
            if not self.peer.knows(remote):
                raise _stale_remote(remote, self.peer)


@dataclass(slots=True)
class _Group:
    """Block pairs that share index vectors and strides."""

    locals: list[BlockTable] = field(default_factory=list)
    remotes: list[BlockTable] = field(default_factory=list)


@dataclass(slots=True)
class _Indices:
    """One pair of index vectors, checked once."""

    local: Index
    remote: Index
    local_high: int
    remote_high: int
    merged: Runs | None = None
    single: Runs | None = None

    def runs(self, dense: bool) -> Runs:
        if dense:
            self.merged = self.merged or index_runs(self.local, self.remote)
            return self.merged
        self.single = self.single or single_blocks(self.local, self.remote)
        return self.single


class _Rows:
    """Short pairs, collected as Python integers until they become one chunk."""

    __slots__ = ("local_offset", "local_region", "nbytes", "remote_offset", "remote_region")

    def __init__(self) -> None:
        self.local_region: list[int] = []
        self.local_offset: list[int] = []
        self.remote_region: list[int] = []
        self.remote_offset: list[int] = []
        self.nbytes: list[int] = []

    def add(self, local: Memory, remote: Memory, rows: list[Row]) -> None:
        for lo, ro, n in rows:
            self.local_region.append(local.region_id)
            self.local_offset.append(lo)
            self.remote_region.append(remote.region_id)
            self.remote_offset.append(ro)
            self.nbytes.append(n)

    def blocks(self) -> Blocks:
        return Blocks(
            np.array(self.local_region, np.int64),
            np.array(self.local_offset, np.uint64),
            np.array(self.remote_region, np.int64),
            np.array(self.remote_offset, np.uint64),
            np.array(self.nbytes, np.uint64),
        )


class Planner:
    """Builds one plan; used for one call and then thrown away."""

    def __init__(
        self, op: Op, peer: Peer, regions: Mapping[int, Region], capabilities: Capabilities
    ) -> None:
        self._op = op
        self._peer = peer
        self._known = regions
        self._capabilities = capabilities
        self._locals: dict[int, Region] = {}
        self._remotes: dict[int, RemoteRegion] = {}
        self._indices: dict[tuple[int, int], _Indices] = {}
        self._footprints: list[Footprint] = []
        self._chunks: list[Blocks] = []
        self._rows: _Rows | None = None

    def plan(self, pairs: Iterable[AnyPair]) -> Plan:
        """Check and merge ``pairs``; raises a ``DescriptorError`` or ``UnsupportedError``."""
        _check_op(self._op, self._capabilities)
        self._peer.check_usable()
        self._collect(pairs)
        blocks = _join(self._chunks)
        parts: tuple[Blocks, ...] = ()
        if blocks is not None:
            self._check_overlap(blocks)
            self._check_alignment(blocks)
            parts = split_blocks(blocks, self._capabilities)
        return Plan(
            op=self._op,
            peer=self._peer,
            regions=tuple(self._locals.values()),
            remote_regions=tuple(self._remotes.values()),
            parts=parts,
            nbytes=self._total(parts),
            descriptors=sum(map(len, parts)),
        )

    def _total(self, parts: tuple[Blocks, ...]) -> int:
        if self._rows is not None and len(self._chunks) == 1:
            return sum(self._rows.nbytes)
        return sum(part.total_bytes for part in parts)

    def _collect(self, pairs: Iterable[AnyPair]) -> None:
        # The list keeps every index vector alive, so that id() identifies it.
        groups: dict[tuple[int, int, int, int, int], _Group] = {}
        alive = list(pairs)
        few = len(alive) <= _FEW_PAIRS
        for pair in alive:
            if isinstance(pair, BlockPair):
                self._collect_blocks(pair, groups, few=few)
            elif isinstance(pair, RangePair):
                self._add_ranges(pair, few=few)
            else:
                raise DescriptorError(
                    f"a transfer takes Pair.blocks or Pair.ranges, got {type(pair).__name__}"
                )
        if self._rows is not None:
            self._chunks.append(self._rows.blocks())
        for (local_id, remote_id, *_), group in groups.items():
            self._add_group(self._indices[local_id, remote_id], group)

    def _collect_blocks(
        self,
        pair: BlockPair,
        groups: dict[tuple[int, int, int, int, int], _Group],
        *,
        few: bool,
    ) -> None:
        local, remote = pair.local, pair.remote
        self._check_memory(local.region, remote.region)
        if local.block_nbytes != remote.block_nbytes:
            raise LengthMismatchError(
                f"blocks have {local.block_nbytes} bytes locally and {remote.block_nbytes} "
                f"remotely (regions {local.region.name!r} and {remote.region.name!r})"
            )
        if few and (rows := short_blocks(pair)) is not None:
            self._add_rows(local.region, remote.region, rows)
            return
        indices = self._check_indices(pair)
        if not len(indices.local):
            return
        _check_index(indices.local_high, local, "local")
        _check_index(indices.remote_high, remote, "remote")
        key = (
            id(pair.local_index),
            id(pair.remote_index),
            local.stride,
            remote.stride,
            local.block_nbytes,
        )
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group()
        group.locals.append(local)
        group.remotes.append(remote)
        target = local if self._op is Op.READ else remote
        high = indices.local_high if self._op is Op.READ else indices.remote_high
        self._footprints.append(Footprint.of_table(target, high))

    def _check_indices(self, pair: BlockPair) -> _Indices:
        key = (id(pair.local_index), id(pair.remote_index))
        found = self._indices.get(key)
        if found is not None:
            return found
        local = as_vector(pair.local_index, "local_index")
        remote = as_vector(pair.remote_index, "remote_index")
        if len(local) != len(remote):
            raise LengthMismatchError(
                f"local_index names {len(local)} blocks, remote_index {len(remote)}"
            )
        if len(local) > 1 and has_duplicates(local if self._op is Op.READ else remote):
            raise _overlap((pair.local if self._op is Op.READ else pair.remote).region.name)
        high = (int(local.max()), int(remote.max())) if len(local) else (-1, -1)
        found = self._indices[key] = _Indices(local, remote, *high)
        return found

    def _add_group(self, indices: _Indices, group: _Group) -> None:
        local, remote = group.locals[0], group.remotes[0]
        runs = indices.runs(local.dense and remote.dense)
        count, tables = len(runs.length), len(group.locals)
        nbytes = runs.length * local.block_nbytes
        self._chunks.append(
            Blocks(
                local_region=_regions(group.locals, count),
                local_offset=_offsets(group.locals, runs.local),
                remote_region=_regions(group.remotes, count),
                remote_offset=_offsets(group.remotes, runs.remote),
                nbytes=(np.tile(nbytes, tables) if tables > 1 else nbytes).view(np.uint64),
            )
        )

    def _add_rows(self, local: Memory, remote: Memory, rows: list[Row]) -> None:
        if not rows:
            return
        side, target = (0, local) if self._op is Op.READ else (1, remote)
        if len(rows) > 1:
            if overlapping(rows, side):
                raise _overlap(target.name)
            rows = merge_rows(rows)
        start = min(row[side] for row in rows)
        end = max(row[side] + row[2] for row in rows)
        self._footprints.append(Footprint(target.region_id, start, end, 0, 0))
        if self._rows is None:
            self._rows = _Rows()
        self._rows.add(local, remote, rows)

    def _add_ranges(self, pair: RangePair, *, few: bool) -> None:
        local, remote = pair.local, pair.remote
        self._check_memory(local, remote)
        if few and (rows := short_ranges(pair)) is not None:
            for lo, ro, n in rows:
                if lo + n > local.nbytes:
                    raise _outside(lo, n, local.nbytes, f"local region {local.name!r}")
                if ro + n > remote.nbytes:
                    raise _outside(ro, n, remote.nbytes, f"remote region {remote.name!r}")
            self._add_rows(local, remote, rows)
            return
        local_offset = as_vector(pair.local_offset, "local_offset")
        remote_offset = as_vector(pair.remote_offset, "remote_offset")
        scalar = np.ndim(pair.nbytes) == 0
        nbytes = as_vector([pair.nbytes] if scalar else pair.nbytes, "nbytes")
        nbytes = np.repeat(nbytes, len(local_offset)) if scalar else nbytes
        if not len(local_offset) == len(remote_offset) == len(nbytes):
            raise LengthMismatchError(
                f"ranges have {len(local_offset)} local offsets, {len(remote_offset)} remote "
                f"offsets and {len(nbytes)} lengths"
            )
        if not nbytes.all():
            keep = nbytes > 0
            local_offset, remote_offset = local_offset[keep], remote_offset[keep]
            nbytes = nbytes[keep]
        if not len(nbytes):
            return
        _check_ranges(local_offset, nbytes, local.nbytes, f"local region {local.name!r}")
        _check_ranges(remote_offset, nbytes, remote.nbytes, f"remote region {remote.name!r}")
        runs = range_runs(local_offset, remote_offset, nbytes)
        n = len(runs.length)
        blocks = Blocks(
            local_region=np.full(n, local.region_id, np.int64),
            local_offset=runs.local.view(np.uint64),
            remote_region=np.full(n, remote.region_id, np.int64),
            remote_offset=runs.remote.view(np.uint64),
            nbytes=runs.length.view(np.uint64),
        )
        target, start = (local, runs.local) if self._op is Op.READ else (remote, runs.remote)
        self._footprints.append(Footprint.of_ranges(target, start, runs.length))
        self._chunks.append(blocks)

    def _check_memory(self, local: object, remote: object) -> None:
        if not isinstance(local, Region) or not isinstance(remote, RemoteRegion):
            raise DescriptorError(
                "a pair takes a local region first and a peer's region second, got "
                f"{type(local).__name__} and {type(remote).__name__}"
            )
        known = self._locals.get(local.region_id) is local
        if known and self._remotes.get(remote.region_id) is remote:
            return
        if self._known.get(local.region_id) is not local:
            raise _stale_local(local)
        if remote.peer is not self._peer or not self._peer.knows(remote):
            raise _stale_remote(remote, self._peer)
        if (local.kind, remote.kind) not in self._capabilities.memory:
            raise UnsupportedError(
                f"no direct path between local {local.kind!r} and remote {remote.kind!r} memory; "
                "use a host staging layer",
                capability="memory",
            )
        _check_access(self._op, local, remote)
        self._locals[local.region_id] = local
        self._remotes[remote.region_id] = remote

    def _check_overlap(self, blocks: Blocks) -> None:
        region_id = find_overlap(self._footprints, blocks, read=self._op is Op.READ)
        if region_id is not None:
            names: Mapping[int, Region | RemoteRegion]
            names = self._locals if self._op is Op.READ else self._remotes
            raise _overlap(names[region_id].name)

    def _check_alignment(self, blocks: Blocks) -> None:
        align = self._capabilities.min_align
        if align <= 1:
            return
        for name in ("local_offset", "remote_offset", "nbytes"):
            wrong = np.flatnonzero(getattr(blocks, name) % np.uint64(align))
            if len(wrong):
                value = int(getattr(blocks, name)[wrong[0]])
                raise DescriptorError(
                    f"{name} {value} is not a multiple of {align}, which this backend needs"
                )


def _check_op(op: Op, capabilities: Capabilities) -> None:
    if op.value not in capabilities.ops:
        raise UnsupportedError(f"this backend cannot {op.value}", capability="ops")


def _check_access(op: Op, local: Region, remote: RemoteRegion) -> None:
    if op is Op.READ and not local.writable:
        raise DescriptorError(f"local region {local.name!r} is read-only; cannot read into it")
    if op.value not in remote.access:
        raise DescriptorError(
            f"peer {remote.peer.name!r} does not allow {op.value} access to region "
            f"{remote.name!r}; it must register with access that includes {op.value!r}"
        )


def _check_index(high: int, table: BlockTable, side: str) -> None:
    if high >= table.count:
        raise OutOfBoundsError(
            f"{side} block {high} is outside the table of region {table.region.name!r}, "
            f"which has {table.count} blocks"
        )


def _check_ranges(offset: Index, nbytes: Index, size: int, where: str) -> None:
    # Compared as "offset > size - nbytes": the sum could wrap, the difference cannot.
    wrong = np.flatnonzero((nbytes > size) | (offset > size - nbytes))
    if len(wrong):
        i = wrong[0]
        raise _outside(int(offset[i]), int(nbytes[i]), size, where)


def _outside(offset: int, nbytes: int, size: int, where: str) -> OutOfBoundsError:
    return OutOfBoundsError(
        f"offset {offset} + {nbytes} bytes ends outside {where}, which has {size} bytes"
    )


def _overlap(name: str) -> DescriptorError:
    return DescriptorError(
        f"two descriptors of one transfer write the same bytes of region {name!r}; "
        "split it into ordered transfers"
    )


def _stale_local(region: Region) -> StaleDescriptorError:
    return StaleDescriptorError(
        f"region {region.name!r} (generation {region.generation}) is no longer registered here"
    )


def _stale_remote(remote: RemoteRegion, peer: Peer) -> StaleDescriptorError:
    return StaleDescriptorError(
        f"remote region {remote.name!r} (generation {remote.generation}) is not what peer "
        f"{peer.name!r} exports now; take it from peer.region() again",
        peer=peer.name,
    )


def _regions(tables: list[BlockTable], count: int) -> Index:
    return np.repeat(np.array([t.region.region_id for t in tables], np.int64), count)


def _offsets(tables: list[BlockTable], first: Index) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    scaled = first * tables[0].stride
    if len(tables) == 1:
        scaled += tables[0].base
        return scaled.view(np.uint64)
    base = np.array([t.base for t in tables], np.int64)
    return np.add.outer(base, scaled).ravel().view(np.uint64)


def _join(chunks: list[Blocks]) -> Blocks | None:
    if len(chunks) <= 1:
        return chunks[0] if chunks else None
    return Blocks(
        *(
            np.concatenate([getattr(chunk, name) for chunk in chunks])
            for name in ("local_region", "local_offset", "remote_region", "remote_offset", "nbytes")
        )
    )
