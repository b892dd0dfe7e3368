"""One step of an agent: what the backend reports becomes state and events.

The agent's lock is held around every call.
"""

from __future__ import annotations

import logging
from time import monotonic

from kvtransport import edge
from kvtransport.backend import Backend, Completion, Notification, PeerDown
from kvtransport.errors import KVTransportError, PeerLostError
from kvtransport.events import EventQueue, NotificationEvent, PeerLostEvent
from kvtransport.inflight import InFlight
from kvtransport.peer import Peer, PeerState
from kvtransport.peers import PeerTable
from kvtransport.stats import Counters

log = logging.getLogger("kvtransport.agent")


class Progress:
    """Polls the backend and routes its events; whoever polls, all events are kept."""

    def __init__(
        self,
        backend: Backend,
        inflight: InFlight,
        peers: PeerTable,
        events: EventQueue,
        counters: Counters,
    ) -> None:
        self._backend = backend
        self._inflight = inflight
        self._peers = peers
        self._events = events
        self._counters = counters

    def step(self) -> None:
        """Progress without blocking; raises only what the backend's poll raises."""
        inflight = self._inflight
        try:
            events = self._backend.poll()
        except KVTransportError:
            raise
        except Exception as error:
            raise edge.foreign(self._backend.poll, error) from error
        for event in events:
            if type(event) is Completion:
                inflight.complete(event)
            else:
                self._dispatch(event)
        now = monotonic()
        if now >= inflight.next_check:
            inflight.sweep(now)
        if inflight.waiting:
            inflight.pump()
        if self._peers.leaving:
            self._peers.reap()

    def _dispatch(self, event: object) -> None:
        if isinstance(event, Notification):
            self._deliver(event)
        elif isinstance(event, PeerDown):
            self._peer_down(event)
        else:
            self._breach(f"reported {event!r:.200}, which is no event")

    def _deliver(self, event: Notification) -> None:
        peer = self._peers.by_id.get(event.peer_id)
        if peer is None:
            if not self._peers.was_known(event.peer_id):
                self._breach(f"attributed a notification to unknown peer {event.peer_id}")
        elif not self._events.put_notification(NotificationEvent(peer, event.payload)):
            log.error("notification of peer %s dropped: nobody reads them", peer.name)

    def _peer_down(self, event: PeerDown) -> None:
        peer = self._peers.by_id.get(event.peer_id)
        if peer is not None:
            self._lose(peer, event.error)
        elif not self._peers.was_known(event.peer_id):
            self._breach(f"reported unknown peer {event.peer_id} as down")

    def _lose(self, peer: Peer, error: KVTransportError) -> None:
        if peer.state in {PeerState.LOST, PeerState.REMOVED}:
            return
        log.warning("peer %s is lost: %s", peer.name, error)
        self._counters.peers_lost += 1
        self._peers.leave(peer, PeerState.LOST, error)
        for transfer in self._inflight.of_peer(peer):
            lost = PeerLostError(f"peer {peer.name!r} is lost: {error}", native=error)
            self._inflight.drain(transfer, lost)
        self._events.put(PeerLostEvent(peer, error))

    def _breach(self, what: str) -> None:
        self._counters.contract_errors += 1
        log.error("backend broke its contract: it %s", what)
