"""Plans of a few descriptors, made without numpy's cost per call.

Makes the plan that ``planner`` would make, or None for whatever is long, unusual
or wrong; the planner then does the work or says what the matter is.  A property
test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtransport.backend import Blocks, Op
from kvtransport.capabilities import Capabilities
from kvtransport.layout.blocks import AnyPair, BlockPair, Memory, RangePair
from kvtransport.layout.short import Row, merge_rows, overlapping, short_blocks, short_ranges
from kvtransport.peer import Peer, PeerState, RemoteRegion
from kvtransport.plan import Plan
from kvtransport.region import Region

FEW_PAIRS = 4
"""Plans of more pairs go to the planner."""


def short_plan(
    op: Op,
    peer: Peer,
    pairs: Sequence[AnyPair],
    regions: Mapping[int, Region],
    limits: Capabilities,
) -> Plan | None:
    """Return the plan, or None when the planner must look at it."""
    if len(pairs) > FEW_PAIRS or peer.state is not PeerState.CONNECTED or limits.min_align != 1:
        return None
    columns = _Columns(op)
    for pair in pairs:
        rows: list[Row] | None
        local: Memory
        remote: Memory
        if type(pair) is BlockPair:
            local, remote = pair.local.region, pair.remote.region
            rows = short_blocks(pair)
        elif type(pair) is RangePair:
            local, remote = pair.local, pair.remote
            rows = short_ranges(pair)
        else:
            return None
        if rows is None or not _usable(op, local, remote, peer, regions, limits):
            return None
        columns.add(local, remote, rows)
    return columns.plan(peer, limits)


def _usable(
    op: Op,
    local: Memory,
    remote: Memory,
    peer: Peer,
    regions: Mapping[int, Region],
    limits: Capabilities,
) -> bool:
    read = op is Op.READ
    name = "read" if read else "write"
    return (
        type(local) is Region
        and type(remote) is RemoteRegion
        and regions.get(local.region_id) is local
        and remote.peer is peer
        and peer.knows(remote)
        and (local.kind, remote.kind) in limits.memory
        and name in limits.ops
        and name in remote.access
        and (local.writable or not read)
    )


class _Columns:
    """Descriptors of all pairs, column by column."""

    __slots__ = ("local", "local_offset", "nbytes", "op", "remote", "remote_offset")

    def __init__(self, op: Op) -> None:
        self.op = op
        self.local: list[Memory] = []
        self.remote: list[Memory] = []
        self.local_offset: list[int] = []
        self.remote_offset: list[int] = []
        self.nbytes: list[int] = []

    def add(self, local: Memory, remote: Memory, rows: list[Row]) -> None:
        if len(rows) > 1:
            rows = merge_rows(rows)
        for lo, ro, n in rows:
            self.local.append(local)
            self.remote.append(remote)
            self.local_offset.append(lo)
            self.remote_offset.append(ro)
            self.nbytes.append(n)

    def plan(self, peer: Peer, limits: Capabilities) -> Plan | None:
        count, total = len(self.nbytes), sum(self.nbytes)
        if not count:
            return None
        if limits.max_descriptors is not None and count > limits.max_descriptors:
            return None
        if limits.max_transfer_bytes is not None and total > limits.max_transfer_bytes:
            return None
        if count > 1 and self._overlapping():
            return None
        blocks = Blocks(
            np.array([region.region_id for region in self.local], np.int64),
            np.array(self.local_offset, np.uint64),
            np.array([region.region_id for region in self.remote], np.int64),
            np.array(self.remote_offset, np.uint64),
            np.array(self.nbytes, np.uint64),
        )
        locals_, remotes = dict.fromkeys(self.local), dict.fromkeys(self.remote)
        # _usable has looked at the types.
        return Plan(
            self.op,
            peer,
            tuple(locals_),  # type: ignore[arg-type]
            tuple(remotes),  # type: ignore[arg-type]
            (blocks,),
            total,
            count,
        )

    def _overlapping(self) -> bool:
        if self.op is Op.READ:
            regions, offsets = self.local, self.local_offset
        else:
            regions, offsets = self.remote, self.remote_offset
        return overlapping(
            [
                (region.region_id, start, start + n)
                for region, start, n in zip(regions, offsets, self.nbytes, strict=True)
            ]
        )
