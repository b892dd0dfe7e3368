"""The links to all peers: who they are, whom a name means, who is a double.

Threading
    The control thread changes it; ``engines`` and ``states`` may be called from
    any thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import zmq

from kvtransport.errors import ProtocolError
from kvtransport.lease import protocol
from kvtransport.lease.address import parse_address
from kvtransport.lease.client import LeaseClient
from kvtransport.lease.held import PeerEngine
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.link import PeerLink, PeerState
from kvtransport.lease.security import CurveKeys
from kvtransport.lease.settings import ControlSettings

logger = logging.getLogger("kvtransport.lease.peers")

_BATCH = 128
"""Messages taken from one socket before the others get their turn."""

Socket: TypeAlias = zmq.Socket[bytes]
Watch: TypeAlias = Callable[[Socket, Callable[[], None]], None]


class Peers:
    """One link per address.  ``watch`` and ``unwatch`` are the control loop's."""

    def __init__(
        self,
        settings: ControlSettings,
        identity: EngineIdentity,
        client: LeaseClient,
        clock: Callable[[], float],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._identity = identity
        self._client = client
        self._clock = clock
        self._links: dict[str, PeerLink] = {}
        self._configured: set[str] = set()

    def open(
        self,
        context: zmq.Context[Socket],
        keys: CurveKeys | None,
        advertise: str,
        watch: Watch,
        unwatch: Callable[[Socket], None],
    ) -> None:
        """Begin to connect to the configured peers."""
        self._context, self._keys, self._advertise = context, keys, advertise
        self._watch, self._unwatch = watch, unwatch
        for name, address in self._settings.peers.items():
            at = str(parse_address(address, f"peers[{name}]"))
            self._configured.add(at)
            if at not in self._links:
                self._add(name, at)

    # -- any thread -----------------------------------------------------------------

    def engines(self) -> list[PeerEngine]:
        """The peers that may be asked now."""
        links = list(self._links.values())
        return [link.peer for link in links if link.usable and link.peer is not None]

    def states(self) -> list[PeerState]:
        """Everything known about every address."""
        now = self._clock()
        return [link.snapshot(now) for link in list(self._links.values())]

    # -- names ----------------------------------------------------------------------

    def resolve(self, names: Iterable[str] | None) -> list[PeerLink]:
        """Links by address, configured name or engine id; all for ``None``."""
        if names is None:
            return list(self._links.values())
        found: dict[str, PeerLink] = {}
        for name in names:
            links = self._resolve(name)
            if not links:
                self.counters["ask.unknown_peer"] += 1
            found.update((link.address, link) for link in links)
        return list(found.values())

    def _resolve(self, name: str) -> list[PeerLink]:
        if name in self._links:
            return [self._links[name]]
        links = list(self._links.values())
        named = [link for link in links if link.is_called(name)]
        if named:
            return [link for link in named if link.usable][:1] or named[:1]
        # It may be the engine id of a peer whose hello is still on its way.
        # Lookups are by content, so asking another one too does no harm.
        return [link for link in links if link.peer is None and link.hopeful]

    # -- links ----------------------------------------------------------------------

    def admit(self, address: str) -> None:
        """Connect to an address that is not configured; the least used one makes room."""
        if address in self._links:
            return
        dynamic = [link for link in self._links.values() if link.address not in self._configured]
        if len(dynamic) >= self._settings.max_dynamic_peers:
            self._drop(min(dynamic, key=lambda link: link.last_used))
        self._add(address, address)

    def _add(self, name: str, address: str) -> PeerLink:
        link = PeerLink(
            self._context,
            name,
            address,
            self._identity,
            advertise=self._advertise,
            keys=self._keys,
            times=self._settings.hello,
            clock=self._clock,
        )
        # Lists are copied by readers in other threads: replace, don't change.
        self._links = {**self._links, address: link}
        self._watch(link.socket, lambda: self._on_socket(link))
        self._watch(link.monitor, lambda: self._on_monitor(link))
        return link

    def _drop(self, link: PeerLink) -> None:
        self._client.link_lost(link, incarnation_gone=True)
        self._links = {at: other for at, other in self._links.items() if other is not link}
        self._unwatch(link.socket)
        self._unwatch(link.monitor)
        link.close(linger_ms=0)

    def close(self, linger_ms: int) -> None:
        """Close all links; what was sent gets ``linger_ms`` to leave."""
        for link in self._links.values():
            link.close(linger_ms)

    # -- time and events ------------------------------------------------------------

    def next_s(self) -> float | None:
        """When ``tick`` wants to be called."""
        return min((link.next_s() for link in self._links.values()), default=None)

    def tick(self, now: float) -> None:
        """Say hello where it is time."""
        for link in list(self._links.values()):
            if link.next_s() <= now:
                before = link.state
                link.tick(now, self._client.next_id())
                self._after(link, before)

    def _on_monitor(self, link: PeerLink) -> None:
        before = link.state
        link.on_monitor(self._clock())
        self._after(link, before)

    def _on_socket(self, link: PeerLink) -> None:
        for _ in range(_BATCH):
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._on_frames(link, frames)

    def _on_frames(self, link: PeerLink, frames: list[bytes]) -> None:
        before = link.state
        try:
            message = protocol.decode_to_reader(frames[0] if len(frames) == 1 else b"")
        except protocol.VersionMismatchError as error:
            link.refuse(str(error), self._clock())
        except ProtocolError as error:
            self.counters["answer.malformed"] += 1
            logger.warning("malformed answer: peer=%s error=%s", link.name, error)
        else:
            if isinstance(message, protocol.HelloReply):
                self._on_hello(link, message)
            else:
                self._client.on_message(link, message)
        self._after(link, before)

    def _on_hello(self, link: PeerLink, reply: protocol.HelloReply) -> None:
        now = self._clock()
        if link.answered(reply, now):
            self.counters["peer.new_incarnation"] += 1
            self._client.link_lost(link, incarnation_gone=True)
        if link.state in ("connected", "not_ready"):
            self._check_identity(link, reply, now)

    def _check_identity(self, link: PeerLink, reply: protocol.HelloReply, now: float) -> None:
        """One engine id must mean one process, and must not be our own."""
        if reply.engine_id == self._identity.engine_id:
            own = reply.incarnation == self._identity.incarnation
            link.refuse("this is me" if own else "another engine uses my engine id", now)
            return
        for other in self._links.values():
            peer = other.peer
            if other is link or peer is None or peer.engine_id != reply.engine_id:
                continue
            same = peer.incarnation == reply.incarnation
            if other.state not in ("connected", "not_ready"):
                if not same:
                    # It moved here: what the old address granted is gone.
                    self._client.link_lost(other, incarnation_gone=True)
            elif same:
                link.refuse(f"same engine as {other.address}", now)
            else:
                link.refuse(
                    f"engine id {reply.engine_id!r} is also used at {other.address}"
                    f" by incarnation {peer.incarnation}, here {reply.incarnation}",
                    now,
                )

    def _after(self, link: PeerLink, before: str) -> None:
        if link.state == before:
            return
        if link.state in ("down", "incompatible"):
            logger.warning(
                "peer %s: peer=%s address=%s reason=%s",
                link.state,
                link.name,
                link.address,
                link.reason,
            )
            self._client.link_lost(link, incarnation_gone=False)
        else:
            self._client.link_changed(link)

    def snapshot(self) -> Mapping[str, int]:
        return dict(self.counters)
