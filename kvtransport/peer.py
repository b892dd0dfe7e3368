"""Remote agents and their regions, as imported from metadata."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    DescriptorError,
    KVTransportError,
    PeerLostError,
    StaleDescriptorError,
)
from kvtransport.region import Access


class PeerState(Enum):
    """``CONNECTED`` peers accept transfers; the others never do again."""

    CONNECTED = "connected"
    LOST = "lost"
    RETIRED = "retired"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, eq=False)
class RemoteRegion:
    """A region of one incarnation of a peer; stale once the peer says otherwise.

    Compared by identity: metadata imported later gives new objects.
    """

    peer: Peer = field(repr=False)
    name: str
    region_id: int
    generation: int
    nbytes: int
    kind: str
    device: int
    access: Access


class Peer:
    """One incarnation of a remote agent.

    Instances come from ``Agent.add_peer`` only.  ``peer_id`` is local to the
    importing agent and never reused.
    """

    __slots__ = (
        "_by_name",
        "_regions",
        "body",
        "capabilities",
        "dropped",
        "epoch",
        "error",
        "in_flight",
        "incarnation",
        "name",
        "peer_id",
        "quarantined",
        "state",
    )

    def __init__(self, peer_id: int, name: str, incarnation: bytes) -> None:
        self.peer_id = peer_id
        self.name = name
        self.incarnation = incarnation
        self.state = PeerState.CONNECTED
        self.error: KVTransportError | None = None
        self.capabilities: Capabilities | None = None
        self.epoch = -1
        self.body = b""
        self.in_flight = 0
        self.quarantined = False
        self.dropped = False
        self._regions: dict[int, RemoteRegion] = {}
        self._by_name: dict[str, RemoteRegion] = {}

    @property
    def regions(self) -> Mapping[str, RemoteRegion]:
        """The peer's regions by name, as of its newest metadata."""
        return MappingProxyType(self._by_name)

    def region(self, name: str) -> RemoteRegion:
        """Return a region by name; ``DescriptorError`` names the nearest one."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        near = difflib.get_close_matches(name, self._by_name, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {len(self._by_name)} regions"
        raise DescriptorError(f"peer {self.name!r} has no region {name!r}{hint}", peer=self.name)

    def update(self, regions: list[RemoteRegion], epoch: int, body: bytes) -> None:
        """Replace what the peer exports; regions that vanished become stale."""
        self._regions = {region.region_id: region for region in regions}
        self._by_name = {region.name: region for region in regions}
        self.epoch = epoch
        self.body = body

    def knows(self, region: RemoteRegion) -> bool:
        """Whether ``region`` is still what the peer exports under that id."""
        current = self._regions.get(region.region_id)
        return current is region or (
            current is not None and current.generation == region.generation
        )

    def check_usable(self) -> None:
        """Raise ``PeerLostError`` or ``StaleDescriptorError`` unless connected."""
        if self.state is PeerState.CONNECTED:
            return
        if self.state is PeerState.LOST:
            raise PeerLostError(
                f"peer {self.name!r} is lost ({self.error}); add it again from new metadata",
                peer=self.name,
            )
        raise StaleDescriptorError(
            f"peer {self.name!r} was {self.state.value}; use the peer that add_peer returns now",
            peer=self.name,
        )

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} id={self.peer_id} {self.state.value}>"
