"""Imported agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransport.errors import (
    BackpressureError,
    IncompatiblePeerError,
    KVTransportError,
    MalformedMetadataError,
    PeerLostError,
    StaleDescriptorError,
)
from kvtransport_backends.nixl.body import Body, RegionEntry
from kvtransport_backends.nixl.driver import Driver, NativeAgent
from kvtransport_backends.nixl.native import is_native, map_native
from kvtransport_backends.nixl.regions import Placed, RegionBook
from kvtransport_backends.nixl.tables import Tables


@dataclass(slots=True)
class Peer:
    """One incarnation of a remote agent.

    ``loaded`` is what NIXL holds of it: regions that the peer withdrew stay
    there until the peer is loaded afresh.  ``pending`` is a newer export that
    needs a fresh load and waits for the transfers in flight.  ``lost`` is set
    once NIXL dropped the peer's connection.
    """

    peer_id: int
    body: Body
    tables: Tables
    book: RegionBook = field(default_factory=RegionBook)
    loaded: list[tuple[Placed, bytes]] = field(default_factory=list)
    in_flight: int = 0
    pending: Body | None = None
    lost: KVTransportError | None = None

    @property
    def name(self) -> str:
        return self.body.agent


class Peers:
    """Loads peers' metadata into NIXL and keeps what transfers need of it."""

    def __init__(
        self, driver: Driver, agent: NativeAgent, plugin_handle: int, backend: str
    ) -> None:
        self._driver = driver
        self._agent = agent
        self._handle = plugin_handle
        self._backend = backend
        self._peers: dict[int, Peer] = {}
        self.ids: dict[str, int] = {}
        """Peer ids by NIXL name."""
        self.reloaded = 0

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def usable(self, peer_id: int) -> Peer:
        """The peer, ready for transfers; raises ``PeerLostError`` and others."""
        peer = self._peers.get(peer_id)
        if peer is None:
            raise StaleDescriptorError("the peer was dropped", backend=self._backend)
        if peer.lost is not None:
            raise PeerLostError(str(peer.lost), backend=self._backend, native=peer.lost.native)
        if peer.pending is not None:
            raise BackpressureError(
                "the peer registered its memory anew; its transfers in flight must end first",
                backend=self._backend,
            )
        return peer

    def load(self, peer_id: int, body: Body) -> None:
        """Learn a peer or its newer export; its former state stays on errors.

        Raises ``MalformedMetadataError``, ``IncompatiblePeerError`` or
        ``PeerLostError``.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            self._load_new(peer_id, body)
        elif peer.name != body.agent:
            raise IncompatiblePeerError(
                f"agent: the peer was {peer.name!r} and now calls itself {body.agent!r}",
                backend=self._backend,
            )
        elif peer.lost is not None:
            self._load_again(peer, body)
        elif not _conflicts(peer, body):
            self._load_more(peer, body)
        elif peer.in_flight:
            peer.pending = body
        else:
            self._load_again(peer, body)

    def load_pending(self, peer: Peer) -> None:
        """Load a newer export that waited for transfers to end."""
        if peer.pending is not None and not peer.in_flight and peer.lost is None:
            body, peer.pending = peer.pending, None
            self._load_again(peer, body)

    def drop(self, peer_id: int) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        del self.ids[peer.name]
        peer.tables.clear()
        self._forget(peer.name)

    def _load_new(self, peer_id: int, body: Body) -> None:
        if body.agent in self.ids:
            raise IncompatiblePeerError(
                f"agent: {body.agent!r} is already imported under another id",
                backend=self._backend,
            )
        peer = Peer(peer_id, body, Tables(self._driver, self._agent, self._handle, body.agent))
        self._load_all(peer, body)
        self._peers[peer_id] = peer
        self.ids[body.agent] = peer_id

    def _load_again(self, peer: Peer, body: Body) -> None:
        former = peer.body
        peer.tables.clear()
        self._forget(peer.name)
        try:
            self._load_all(peer, body)
        except KVTransportError:
            if peer.lost is None:
                self._load_all(peer, former)
            raise
        peer.lost, peer.pending = None, None
        self.reloaded += 1

    def _load_all(self, peer: Peer, body: Body) -> None:
        try:
            self._native(body.connection, body.agent)
            for entry in body.regions:
                self._native(entry.native, body.agent)
        except KVTransportError:
            self._forget(body.agent)
            raise
        peer.loaded = [(_placed(entry), entry.native) for entry in body.regions]
        _adopt(peer, body)

    def _load_more(self, peer: Peer, body: Body) -> None:
        known = {placed.region_id for placed, _ in peer.loaded}
        for entry in body.regions:
            if entry.region_id not in known:
                self._native(entry.native, body.agent)
                peer.loaded.append((_placed(entry), entry.native))
        _adopt(peer, body)

    def _native(self, metadata: bytes, name: str) -> None:
        with map_native(
            "loading the peer's metadata",
            backend=self._backend,
            peer=name,
            otherwise=MalformedMetadataError,
        ):
            loaded = self._agent.loadRemoteMD(metadata)
        if loaded != name.encode():
            self._forget(loaded.decode(errors="replace"))
            raise MalformedMetadataError(
                f"the metadata of {name!r} describes another agent", backend=self._backend
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


def _adopt(peer: Peer, body: Body) -> None:
    peer.body = body
    current = {entry.region_id for entry in body.regions}
    for placed in list(peer.book):
        if placed.region_id not in current:
            peer.book.remove(placed.region_id)
    for entry in body.regions:
        if entry.region_id not in peer.book:
            peer.book.add(_placed(entry))


def _conflicts(peer: Peer, body: Body) -> bool:
    """Whether NIXL could confuse a new region with one that it already holds."""
    known = {placed.region_id for placed, _ in peer.loaded}
    for entry in body.regions:
        if entry.region_id in known:
            continue
        placed = _placed(entry)
        for other, native in peer.loaded:
            if placed.overlaps(other) and native != entry.native:
                return True
    return False
