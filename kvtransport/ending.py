"""Draining transfers, and giving everything up when an agent closes."""

from __future__ import annotations

import logging
import threading
from time import monotonic

from kvtransport import lifetime
from kvtransport.errors import KVTransportError
from kvtransport.inflight import InFlight
from kvtransport.peer import Peer, PeerState
from kvtransport.peers import PeerTable
from kvtransport.progress import Progress
from kvtransport.regions import RegionTable
from kvtransport.waiting import Pause

log = logging.getLogger("kvtransport.agent")


def drain_until(
    until: float,
    *,
    lock: threading.RLock,
    progress: Progress,
    inflight: InFlight,
    peer: Peer | None = None,
) -> None:
    """Wait until ``until`` for the transfers of one or all peers; quarantine what stays."""
    pause = Pause()
    while True:
        with lock:
            if inflight.of_peer(peer):
                progress.step()
            remaining = inflight.of_peer(peer)
            if remaining and monotonic() >= until:
                for transfer in remaining:
                    inflight.quarantine(transfer)
                remaining = []
            if not remaining:
                return
        pause()


def release_all(inflight: InFlight, regions: RegionTable, peers: PeerTable) -> None:
    """Give up regions and peers; what is not quiet is kept until the process ends."""
    for transfer in inflight.of_peer(None):
        inflight.quarantine(transfer)
    for region in regions:
        if region.quarantined_bytes:
            lifetime.keep_for_ever(region)
            continue
        try:
            regions.deregister(region)
        except KVTransportError as error:
            log.warning("deregistering %s at close failed: %s", region.name, error)
            lifetime.keep_for_ever(region)
    for peer in peers:
        peers.leave(peer, PeerState.REMOVED)
    peers.reap()
