"""Imported agents.

A dropped peer is parked rather than disconnected: UCX leaks a file descriptor
on both sides for every connection that is closed while the peer lives, and
LIBFABRIC's peers answer one handshake only.  A parked peer is found again by
its agent's name; beyond ``MAX_PARKED`` the oldest is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransport.errors import (
    HandshakeTimeoutError,
    IncompatiblePeerError,
    KVTransportError,
    MalformedMetadataError,
    PeerLostError,
    StaleDescriptorError,
)
from kvtransport_backends.nixl.body import Body, RegionEntry
from kvtransport_backends.nixl.connect import Connector
from kvtransport_backends.nixl.driver import Driver, NativeAgent
from kvtransport_backends.nixl.native import is_native, map_native
from kvtransport_backends.nixl.regions import Placed, RegionBook
from kvtransport_backends.nixl.tables import Tables

MAX_PARKED = 64


@dataclass(slots=True, eq=False)
class Peer:
    """One connection to one incarnation of a remote agent.

    ``ids`` are the peer ids that mean it: usually one, none while it is parked.
    ``loaded`` are the regions that NIXL holds; those that the peer withdrew
    stay there, where no transfer names them.  ``lost`` is why the peer takes no
    transfers any more; ``forgotten`` says that NIXL answers no questions about
    its transfers; ``disconnected`` that NIXL was told.
    """

    body: Body
    tables: Tables
    ids: list[int] = field(default_factory=list)
    book: RegionBook = field(default_factory=RegionBook)
    loaded: set[int] = field(default_factory=set)
    in_flight: int = 0
    lost: KVTransportError | None = None
    forgotten: bool = False
    disconnected: bool = False

    @property
    def name(self) -> str:
        return self.body.agent


class Peers:
    """Loads peers' metadata into NIXL and keeps what transfers need of it."""

    def __init__(
        self,
        driver: Driver,
        agent: NativeAgent,
        plugin_handle: int,
        backend: str,
        connector: Connector,
    ) -> None:
        self._driver = driver
        self._agent = agent
        self._handle = plugin_handle
        self._backend = backend
        self._connector = connector
        self._by_id: dict[int, Peer] = {}
        self._by_name: OrderedDict[str, Peer] = OrderedDict()

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_name.values())

    def named(self, name: str) -> Peer | None:
        """The newest connection to a NIXL agent."""
        return self._by_name.get(name)

    def id_of(self, name: str) -> int | None:
        """The newest peer id of a NIXL agent, or None."""
        peer = self._by_name.get(name)
        return peer.ids[-1] if peer is not None and peer.ids else None

    def usable(self, peer_id: int) -> Peer:
        """The peer, ready for transfers; raises ``StaleDescriptorError`` or ``PeerLostError``."""
        peer = self._by_id.get(peer_id)
        if peer is None:
            raise StaleDescriptorError("the peer was dropped", backend=self._backend)
        if peer.lost is not None:
            raise PeerLostError(str(peer.lost), backend=self._backend, native=peer.lost.native)
        return peer

    def load(self, peer_id: int, body: Body) -> None:
        """Learn a peer or its newer export; its former state stays on errors.

        Raises ``MalformedMetadataError``, ``IncompatiblePeerError`` or
        ``PeerLostError``.
        """
        known = self._by_id.get(peer_id)
        if known is not None and known.name != body.agent:
            raise IncompatiblePeerError(
                "agent: the metadata belongs to another agent than the one imported before",
                backend=self._backend,
            )
        peer = known or self._by_name.get(body.agent)
        if peer is not None and peer.lost is not None and not self._connector.remakes:
            # Its lifeline broke and holds again: only the lifeline had failed.
            peer.lost = None
        if peer is None or peer.lost is not None:
            if peer is not None:
                self.disconnect(peer)
            fresh = self._load_new(body)
            if peer is known and peer is not None:
                fresh.ids, peer.ids = peer.ids, []
            peer = fresh
        else:
            self._load_more(peer, body)
        if peer_id not in peer.ids:
            peer.ids.append(peer_id)
        self._by_id.update(dict.fromkeys(peer.ids, peer))
        self._by_name[body.agent] = peer
        self._by_name.move_to_end(body.agent)

    def drop(self, peer_id: int) -> None:
        peer = self._by_id.pop(peer_id, None)
        if peer is None:
            return
        peer.ids.remove(peer_id)
        if peer.lost is not None and self._by_name.get(peer.name) is peer and not peer.ids:
            del self._by_name[peer.name]
            if not peer.in_flight and self._connector.remakes:
                self.disconnect(peer)
        self._evict()

    def disconnect(self, peer: Peer) -> None:
        """Make NIXL forget a lost peer; it does not always do so by itself."""
        if not peer.disconnected:
            peer.disconnected = True
            self._forget(peer.name)

    def clear_tables(self) -> None:
        for peer in self:
            peer.tables.clear()

    def _evict(self) -> None:
        if not self._connector.remakes:
            return
        # Quarantined transfers keep their connection.
        parked = [peer for peer in self if not peer.ids and not peer.in_flight]
        for peer in parked[: max(0, len(parked) - MAX_PARKED)]:
            del self._by_name[peer.name]
            peer.tables.clear()
            self._forget(peer.name)

    def _load_new(self, body: Body) -> Peer:
        peer = Peer(body, Tables(self._driver, self._agent, self._handle, body.agent))
        try:
            with map_native("connecting", backend=self._backend, otherwise=PeerLostError):
                self._connector.connect(
                    body.agent, lambda: self._native(body.connection, body.agent)
                )
            self._load_regions(peer, body)
        except HandshakeTimeoutError:
            raise  # NIXL is still at it
        except KVTransportError:
            self._forget(body.agent)
            raise
        return peer

    def _load_more(self, peer: Peer, body: Body) -> None:
        try:
            self._load_regions(peer, body)
        except KVTransportError as error:
            # NIXL drops all that it knows of a peer when a part does not load.
            peer.lost = error
            peer.tables.clear()
            raise

    def _load_regions(self, peer: Peer, body: Body) -> None:
        """Load the regions that are new; no two of one agent look alike to NIXL."""
        for entry in body.regions:
            if entry.region_id not in peer.loaded:
                self._native(entry.native, body.agent)
                peer.loaded.add(entry.region_id)
        peer.body = body
        current = {entry.region_id: entry for entry in body.regions}
        for placed in list(peer.book):
            if placed.region_id not in current:
                peer.book.remove(placed.region_id)
        for entry in body.regions:
            if entry.region_id not in peer.book:
                peer.book.add(_placed(entry))

    def _native(self, metadata: bytes, name: str) -> None:
        with map_native(
            "loading the peer's metadata",
            backend=self._backend,
            otherwise=MalformedMetadataError,
        ):
            loaded = self._agent.loadRemoteMD(metadata)
        if loaded != name.encode():
            other = loaded.decode(errors="replace")
            if other not in self._by_name:
                self._forget(other)
            raise MalformedMetadataError(
                "a part of the metadata describes another agent", backend=self._backend
            )

    def _forget(self, name: str) -> None:
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception as error:
            # NIXL forgets a lost peer by itself.
            if not is_native(error):
                raise


def _placed(entry: RegionEntry) -> Placed:
    return Placed(entry.region_id, entry.kind, entry.device_id, entry.address, entry.nbytes)
