"""The peers of one agent: import, replacement and removal."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

from kvtransport import edge
from kvtransport.backend import Backend
from kvtransport.errors import (
    IncompatiblePeerError,
    KVTransportError,
    StaleDescriptorError,
)
from kvtransport.metadata import Body, Header, check_compatible, decode_body, open_metadata
from kvtransport.peer import Peer, PeerState, RemoteRegion

log = logging.getLogger("kvtransport.peer")

_REMEMBERED_INCARNATIONS = 4096


class PeerTable:
    """Imports metadata and drops peers once they are idle; the agent holds its lock."""

    def __init__(
        self, backend: Backend, *, wire: str, fingerprint: bytes, incarnation: bytes
    ) -> None:
        self._backend = backend
        self._wire = wire
        self._fingerprint = fingerprint
        self._incarnation = incarnation
        self._ids = count(1)
        self._last_id = 0
        self._by_name: dict[str, Peer] = {}
        self._retired: OrderedDict[bytes, None] = OrderedDict()
        self.by_id: dict[int, Peer] = {}
        self.leaving: list[Peer] = []
        """Peers that accept no transfers and wait for theirs to end."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self.by_id.values()))

    def was_known(self, peer_id: int) -> bool:
        """Whether the id belonged to a peer that is dropped now."""
        return peer_id not in self.by_id and 0 < peer_id <= self._last_id

    def check_known(self, peer: Peer) -> None:
        """Raise ``StaleDescriptorError`` unless the peer belongs to this agent."""
        if self.by_id.get(peer.peer_id) is not peer:
            raise StaleDescriptorError(
                f"peer {peer.name!r} was not added to this agent", peer=peer.name
            )

    def add(self, blob: bytes) -> Peer:
        """Import metadata; the former state stays after an error."""
        header, raw = open_metadata(blob)
        check_compatible(header, self._wire, self._fingerprint)
        self._check_incarnation(header)
        body = decode_body(raw)
        current = self._by_name.get(header.name)
        if current is not None and current.incarnation == header.incarnation:
            if current.state is PeerState.CONNECTED:
                self._refresh(current, header, body)
                return current
        elif current is not None:
            log.debug("peer %s has a new incarnation", header.name)
        peer = self._import(header, body)
        if current is not None:
            self._replace(current, peer)
        self._by_name[header.name] = peer
        return peer

    def _check_incarnation(self, header: Header) -> None:
        if header.incarnation == self._incarnation:
            raise IncompatiblePeerError(
                f"peer {header.name!r} is this agent itself; exchange metadata with another one",
                peer=header.name,
            )
        if header.incarnation in self._retired:
            raise StaleDescriptorError(
                f"metadata of peer {header.name!r} belongs to an earlier incarnation; "
                "a newer one was added already",
                peer=header.name,
            )

    def _import(self, header: Header, body: Body) -> Peer:
        peer_id = self._last_id = next(self._ids)
        peer = Peer(peer_id, header.name, header.incarnation)
        peer.capabilities = body.capabilities
        edge.call(self._backend.import_peer, peer_id, body.backend)
        peer.update(_regions(peer, body), header.epoch, body.backend)
        self.by_id[peer_id] = peer
        return peer

    def _refresh(self, peer: Peer, header: Header, body: Body) -> None:
        # Exports may arrive out of order; only a newer one says anything new.
        if header.epoch < peer.epoch:
            return
        if header.epoch == peer.epoch and body.backend == peer.body:
            return
        edge.call(self._backend.import_peer, peer.peer_id, body.backend)
        peer.update(_regions(peer, body), header.epoch, body.backend)

    def _replace(self, old: Peer, new: Peer) -> None:
        if old.incarnation != new.incarnation:
            self._retired[old.incarnation] = None
            if len(self._retired) > _REMEMBERED_INCARNATIONS:
                self._retired.popitem(last=False)
        self.leave(old, PeerState.RETIRED)

    def leave(self, peer: Peer, state: PeerState, error: KVTransportError | None = None) -> None:
        """Take no more transfers for a peer; it is dropped once it is idle."""
        if peer.state in {PeerState.CONNECTED, PeerState.LOST}:
            peer.state = state
            peer.error = error or peer.error
        if not peer.dropped and peer not in self.leaving:
            self.leaving.append(peer)
        if state is PeerState.REMOVED and self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]

    def reap(self) -> None:
        """Drop every leaving peer without transfers.

        A quarantined peer is never dropped: what was mapped from it may be in use.
        """
        for peer in [p for p in self.leaving if not p.in_flight and not p.quarantined]:
            self.leaving.remove(peer)
            peer.dropped = True
            del self.by_id[peer.peer_id]
            try:
                edge.call(self._backend.drop_peer, peer.peer_id)
            except KVTransportError as error:
                log.warning("dropping peer %s failed: %s", peer.name, error)


def _regions(peer: Peer, body: Body) -> list[RemoteRegion]:
    return [
        RemoteRegion(
            peer=peer,
            name=entry.name,
            region_id=entry.region_id,
            generation=entry.generation,
            nbytes=entry.nbytes,
            kind=entry.kind,
            device=entry.device,
            access=entry.access,
        )
        for entry in body.regions
    ]
