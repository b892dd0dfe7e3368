"""Saboteurs of first contact, restart and peer death."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtransport.backend import Blocks, Completion, Event, Op, PeerDown
from kvtransport.errors import MalformedMetadataError, PeerLostError, RegionBusyError
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur


@saboteur("MD-02", "MD-10")
class ChokesOnGarbage(BrokenBackend):
    """Raises whatever its parser raises for damaged metadata."""

    def import_peer(self, peer_id: int, body: bytes) -> None:
        try:
            self.inner.import_peer(peer_id, body)
        except MalformedMetadataError as error:
            raise KeyError("agent_id") from error


@saboteur("MD-02", "MD-10")
class DiesOnGarbage(BrokenBackend):
    """Ends the process at damaged metadata, as an assertion in a driver does."""

    def import_peer(self, peer_id: int, body: bytes) -> None:
        try:
            self.inner.import_peer(peer_id, body)
        except MalformedMetadataError:
            os.kill(os.getpid(), signal.SIGABRT)


@saboteur("MD-10")
class Unpickles(BrokenBackend):
    """Tries pickle first when it decodes a peer's metadata."""

    def import_peer(self, peer_id: int, body: bytes) -> None:
        if body[:1] == b"\x80":
            try:
                pickle.loads(body)  # noqa: S301  # the very fault that must be caught
            except Exception as error:
                raise MalformedMetadataError("not mine") from error
        self.inner.import_peer(peer_id, body)


@saboteur("MD-05", "MD-06")
class ForgetsUpdates(BrokenBackend):
    """Ignores a newer export of a peer that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()

    def import_peer(self, peer_id: int, body: bytes) -> None:
        if peer_id not in self._known:
            self.inner.import_peer(peer_id, body)
            self._known.add(peer_id)


@saboteur("CON-04")
class ConfusesPeers(BrokenBackend):
    """Has room for five peers and sends what is meant for others to the fifth."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[int] = []

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self.inner.import_peer(peer_id, body)
        if peer_id not in self._order:
            self._order.append(peer_id)

    def drop_peer(self, peer_id: int) -> None:
        if peer_id in self._order:
            self._order.remove(peer_id)
        self.inner.drop_peer(peer_id)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if peer_id in self._order[5:]:
            peer_id = self._order[4]
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("MD-13")
class ListenerDies(BrokenBackend):
    """Runs a listener that ends at the first bad request and takes the agent with it."""

    def open(self, name: str, config: Any) -> None:
        self._dead = False
        self.inner.open(name, config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                client, _ = self._socket.accept()
                with client:
                    self._dead |= bool(client.recv(64))
        except OSError:
            return

    def poll(self) -> Sequence[Event]:
        if self._dead:
            raise PeerLostError("listener is gone")
        return self.inner.poll()

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()
            del self._socket
        self.inner.close()


@saboteur("PD-01")
class HangsOnPeerDeath(BrokenBackend):
    """Reports neither a dead peer nor the transfers that died with it."""

    def poll(self) -> Sequence[Event]:
        return [
            event
            for event in self.inner.poll()
            if not isinstance(event, PeerDown)
            and not (isinstance(event, Completion) and isinstance(event.error, PeerLostError))
        ]


@saboteur("PD-02")
class LocksForDeadReader(BrokenBackend):
    """Keeps memory locked for a reader that is dead."""

    def __init__(self) -> None:
        super().__init__()
        self._mourns = False

    def poll(self) -> Sequence[Event]:
        found = self.inner.poll()
        self._mourns |= any(isinstance(event, PeerDown) for event in found)
        return found

    def deregister(self, region_id: int) -> None:
        if self._mourns:
            raise RegionBusyError("a reader has not let go")
        self.inner.deregister(region_id)


class Mourns(BrokenBackend):
    """Base: knows since when a peer is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.dead_since = 0.0

    def poll(self) -> Sequence[Event]:
        found = self.inner.poll()
        for event in found:
            lost = isinstance(event, Completion) and isinstance(event.error, PeerLostError)
            if isinstance(event, PeerDown) or lost:
                self.dead_since = self.dead_since or time.monotonic()
        return found


@saboteur("PD-05")
class SlowAfterDeath(Mourns):
    """Pauses before every post once a peer has died."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if self.dead_since:
            time.sleep(0.02)
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("MD-05", "PD-04", "PD-05", "PD-07")
class PoisonedByDeath(Mourns):
    """Refuses transfers with every peer once one has died."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if self.dead_since:
            raise PeerLostError("endpoint is in error state")
        self.inner.post(ticket, op, peer_id, blocks, notify)
