"""Planning on vectors: any number of descriptors, and errors that explain.

The work is proportional to tables plus runs, not to tables times blocks.
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
    UnsupportedError,
)
from kvtransport.layout.blocks import AnyPair, BlockPair, BlockTable, RangePair
from kvtransport.layout.merge import Runs, index_runs, range_runs, single_blocks
from kvtransport.layout.overlap import Footprint, find_overlap
from kvtransport.layout.split import split_blocks
from kvtransport.layout.vector import Index, Vector, as_vector
from kvtransport.peer import Peer, RemoteRegion
from kvtransport.plan import Plan, stale_local, stale_remote
from kvtransport.region import Region
from kvtransport.short_plan import short_plan

_Key = tuple[int, int, int, int, int]
"""Identity of two index vectors, strides of two tables, bytes of a block."""


def make_plan(
    op: Op,
    peer: Peer,
    pairs: Iterable[AnyPair],
    regions: Mapping[int, Region],
    limits: Capabilities,
) -> Plan:
    """Check and merge ``pairs``.

    Raises ``DescriptorError``, ``UnsupportedError`` or ``PeerLostError``.
    """
    # A list keeps every index vector alive, so that id() identifies it.
    alive = list(pairs)
    plan = short_plan(op, peer, alive, regions, limits)
    return plan if plan is not None else _Planner(op, peer, regions, limits).plan(alive)


@dataclass(slots=True)
class _Group:
    """Block pairs that share index vectors and strides."""

    locals: list[BlockTable] = field(default_factory=list)
    remotes: list[BlockTable] = field(default_factory=list)


@dataclass(slots=True)
class _Indices:
    """One pair of index vectors, checked and merged once."""

    local: Vector
    remote: Vector
    merged: Runs | None = None
    single: Runs | None = None

    def runs(self, *, dense: bool) -> Runs:
        if dense:
            self.merged = self.merged or index_runs(self.local, self.remote)
            return self.merged
        self.single = self.single or single_blocks(self.local, self.remote)
        return self.single


class _Planner:
    """Builds one plan; used for one call and then thrown away."""

    def __init__(
        self, op: Op, peer: Peer, regions: Mapping[int, Region], limits: Capabilities
    ) -> None:
        self._op = op
        self._peer = peer
        self._known = regions
        self._limits = limits
        self._locals: dict[int, Region] = {}
        self._remotes: dict[int, RemoteRegion] = {}
        self._indices: dict[tuple[int, int], _Indices] = {}
        self._groups: dict[_Key, _Group] = {}
        self._footprints: list[Footprint] = []
        self._chunks: list[Blocks] = []

    def plan(self, pairs: list[AnyPair]) -> Plan:
        if self._op.value not in self._limits.ops:
            raise UnsupportedError(f"this backend cannot {self._op.value}", capability="ops")
        self._peer.check_usable()
        for pair in pairs:
            self._collect(pair)
        for (local_id, remote_id, *_), group in self._groups.items():
            self._add_group(self._indices[local_id, remote_id], group)
        blocks = _join(self._chunks)
        parts: tuple[Blocks, ...] = ()
        if blocks is not None:
            self._check_overlap(blocks)
            self._check_alignment(blocks)
            parts = split_blocks(blocks, self._limits)
        return Plan(
            op=self._op,
            peer=self._peer,
            regions=tuple(self._locals.values()),
            remote_regions=tuple(self._remotes.values()),
            parts=parts,
            nbytes=blocks.total_bytes if blocks is not None else 0,
            descriptors=sum(map(len, parts)),
        )

    def _collect(self, pair: object) -> None:
        if isinstance(pair, BlockPair):
            self._collect_blocks(pair)
        elif isinstance(pair, RangePair):
            self._add_ranges(pair)
        else:
            raise DescriptorError(
                f"a transfer takes Pair.blocks or Pair.ranges, got {type(pair).__name__}"
            )

    def _collect_blocks(self, pair: BlockPair) -> None:
        local, remote = pair.local, pair.remote
        self._check_memory(local.region, remote.region)
        if local.block_nbytes != remote.block_nbytes:
            raise LengthMismatchError(
                f"blocks have {local.block_nbytes} bytes locally and {remote.block_nbytes} "
                f"remotely (regions {local.region.name!r} and {remote.region.name!r})"
            )
        indices = self._check_indices(pair)
        if not len(indices.local):
            return
        _check_index(indices.local, local, "local")
        _check_index(indices.remote, remote, "remote")
        key = (
            id(pair.local_index),
            id(pair.remote_index),
            local.stride,
            remote.stride,
            local.block_nbytes,
        )
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.locals.append(local)
        group.remotes.append(remote)
        target, index = (local, indices.local) if self._op is Op.READ else (remote, indices.remote)
        self._footprints.append(Footprint.of_table(target, index.high))

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
        if (local if self._op is Op.READ else remote).has_duplicates():
            raise _overlap((pair.local if self._op is Op.READ else pair.remote).region.name)
        found = self._indices[key] = _Indices(local, remote)
        return found

    def _add_group(self, indices: _Indices, group: _Group) -> None:
        local, remote = group.locals[0], group.remotes[0]
        runs = indices.runs(dense=local.dense and remote.dense)
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

    def _add_ranges(self, pair: RangePair) -> None:
        local, remote = pair.local, pair.remote
        self._check_memory(local, remote)
        here = as_vector(pair.local_offset, "local_offset").values
        there = as_vector(pair.remote_offset, "remote_offset").values
        scalar = np.ndim(pair.nbytes) == 0
        nbytes = as_vector([pair.nbytes] if scalar else pair.nbytes, "nbytes").values
        nbytes = np.repeat(nbytes, len(here)) if scalar else nbytes
        if not len(here) == len(there) == len(nbytes):
            raise LengthMismatchError(
                f"ranges have {len(here)} local offsets, {len(there)} remote offsets and "
                f"{len(nbytes)} lengths"
            )
        _check_ranges(here, nbytes, local.nbytes, f"local region {local.name!r}")
        _check_ranges(there, nbytes, remote.nbytes, f"remote region {remote.name!r}")
        if not nbytes.all():
            keep = nbytes > 0
            here, there, nbytes = here[keep], there[keep], nbytes[keep]
        if not len(nbytes):
            return
        runs = range_runs(here, there, nbytes)
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
            raise stale_local(local)
        if remote.peer is not self._peer or not self._peer.knows(remote):
            raise stale_remote(remote, self._peer)
        if (local.kind, remote.kind) not in self._limits.memory:
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
        align = self._limits.min_align
        if align <= 1:
            return
        for name in ("local_offset", "remote_offset", "nbytes"):
            wrong = np.flatnonzero(getattr(blocks, name) % np.uint64(align))
            if len(wrong):
                value = int(getattr(blocks, name)[wrong[0]])
                raise DescriptorError(
                    f"{name} {value} is not a multiple of {align}, which this backend needs"
                )


def _check_access(op: Op, local: Region, remote: RemoteRegion) -> None:
    if op is Op.READ and not local.writable:
        raise DescriptorError(f"local region {local.name!r} is read-only; cannot read into it")
    if op.value not in remote.access:
        raise DescriptorError(
            f"peer {remote.peer.name!r} does not allow {op.value} access to region "
            f"{remote.name!r}; it must register with access that includes {op.value!r}"
        )


def _check_index(index: Vector, table: BlockTable, side: str) -> None:
    if index.high >= table.count:
        raise OutOfBoundsError(
            f"{side} block {index.high} is outside the table of region {table.region.name!r}, "
            f"which has {table.count} blocks"
        )


def _check_ranges(offset: Index, nbytes: Index, size: int, where: str) -> None:
    # Compared as "offset > size - nbytes": the sum could wrap, the difference cannot.
    wrong = np.flatnonzero((nbytes > size) | (offset > size - nbytes))
    if len(wrong):
        i = wrong[0]
        raise OutOfBoundsError(
            f"offset {offset[i]} + {nbytes[i]} bytes ends outside {where}, which has {size} bytes"
        )


def _overlap(name: str) -> DescriptorError:
    return DescriptorError(
        f"two descriptors of one transfer write the same bytes of region {name!r}; "
        "split it into ordered transfers"
    )


def _regions(tables: list[BlockTable], count: int) -> Index:
    if len(tables) == 1:
        return np.full(count, tables[0].region.region_id, np.int64)
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
