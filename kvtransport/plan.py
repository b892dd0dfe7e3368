"""Plans: transfers that were checked and merged, ready to post.

Everything is checked before anything is posted: regions and peers are current,
indices inside their tables, ranges inside their regions (without wrapping),
access allowed, destinations free of overlap, the declared limits kept.

Two ways lead to the same plan.  ``planner`` works on vectors and explains what
is wrong; ``short_plan`` handles a few descriptors without numpy and gives up on
anything unusual.
"""

from __future__ import annotations

import numpy as np

from kvtransport.backend import Blocks, Op
from kvtransport.errors import StaleDescriptorError
from kvtransport.peer import Peer, RemoteRegion
from kvtransport.region import Region

EMPTY = Blocks(
    local_region=np.empty(0, np.int64),
    local_offset=np.empty(0, np.uint64),
    remote_region=np.empty(0, np.int64),
    remote_offset=np.empty(0, np.uint64),
    nbytes=np.empty(0, np.uint64),
)
"""What is posted for a message without data."""


class Plan:
    """A checked transfer; ``parts`` respect the backend's limits.

    ``nbytes`` and ``descriptors`` are totals.  Not to be changed; a plan may be
    posted many times.
    """

    __slots__ = ("descriptors", "nbytes", "op", "parts", "peer", "regions", "remote_regions")

    def __init__(
        self,
        op: Op,
        peer: Peer,
        regions: tuple[Region, ...] = (),
        remote_regions: tuple[RemoteRegion, ...] = (),
        parts: tuple[Blocks, ...] = (),
        nbytes: int = 0,
        descriptors: int = 0,
    ) -> None:
        self.op = op
        self.peer = peer
        self.regions = regions
        self.remote_regions = remote_regions
        self.parts = parts
        self.nbytes = nbytes
        self.descriptors = descriptors

    def check_current(self) -> None:
        """Raise unless every region and the peer are still what was planned for."""
        peer = self.peer
        peer.check_usable()
        for region in self.regions:
            if not region.registered:
                raise stale_local(region)
        for remote in self.remote_regions:
            if not peer.knows(remote):
                raise stale_remote(remote, peer)


def stale_local(region: Region) -> StaleDescriptorError:
    """The error for a local region that this agent does not have (any more)."""
    return StaleDescriptorError(
        f"region {region.name!r} (generation {region.generation}) is not registered here"
    )


def stale_remote(remote: RemoteRegion, peer: Peer) -> StaleDescriptorError:
    """The error for a remote region that ``peer`` does not export (any more)."""
    return StaleDescriptorError(
        f"remote region {remote.name!r} (generation {remote.generation}) is not what peer "
        f"{peer.name!r} exports now; take it from peer.region() again",
        peer=peer.name,
    )
