"""The control plane of one engine: serves its ledger and asks its peers.

Architecture
    One thread runs the owner's ROUTER socket (``server``), one DEALER per peer
    (``link``), the reader's book-keeping (``client``) and, with a cluster
    secret, the check of client keys.  Other threads hand over work through a
    queue and are never made to wait.

Lifecycle
    ``start`` binds and raises ``ConfigError`` when that can't work.  ``close``
    gives all leases back and ends the thread; every unfinished lookup gets the
    result ``closed``.

Security
    With a cluster secret everything is encrypted and both sides prove that they
    hold it.  Without one, only loopback addresses are accepted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvtransport.errors import (
    AuthenticationError,
    ClosedError,
    ConfigError,
    ProtocolError,
)
from kvtransport.lease import protocol
from kvtransport.lease.address import Address, parse_address
from kvtransport.lease.client import LeaseClient
from kvtransport.lease.digest import DigestChain
from kvtransport.lease.held import HeldLease, Lookup
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.ledger import Ledger
from kvtransport.lease.link import LinkTimes, PeerLink
from kvtransport.lease.security import ClusterSecret, is_address_token, verify_address
from kvtransport.lease.server import LeaseServer
from kvtransport.lease.wake import Wake
from kvtransport.lease.zap import ZapHandler

logger = logging.getLogger("kvtransport.lease.control")

_BATCH = 128
"""Messages taken from one socket before the others get their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Where to listen, whom to ask, and the limits.

    ``listen`` may have port 0; ``advertise`` is the address that others reach,
    by default the bound one.  ``peers`` maps names to addresses.  Times are in
    seconds.  ``rate_per_s`` is the most messages accepted from one client.
    """

    listen: str = "tcp://127.0.0.1:0"
    advertise: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
    secret: ClusterSecret | None = None
    lease_s: float = 10.0
    lookup_timeout_s: float = 1.0
    hello: LinkTimes = field(default_factory=LinkTimes)
    max_message_bytes: int = 4 * 2**20
    max_dynamic_peers: int = 64
    rate_per_s: float = 50_000.0

    def __post_init__(self) -> None:
        for name in ("lease_s", "lookup_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= 3600):
                raise ConfigError(f"{name} must be more than 0 and at most 3600, not {value!r}")
        if self.max_message_bytes < 4096:
            raise ConfigError(f"max_message_bytes must be at least 4096, not {self.max_message_bytes}")
        listen = parse_address(self.listen, "listen", allow_port_0=True)
        peers = {name: parse_address(at, f"peers[{name}]") for name, at in self.peers.items()}
        if self.secret is None:
            self._require_loopback(listen, peers)
        self._check_advertise(listen, peers)

    @staticmethod
    def _require_loopback(listen: Address, peers: Mapping[str, Address]) -> None:
        for setting, address in {"listen": listen, **peers}.items():
            if not address.is_loopback:
                raise ConfigError(
                    f"{setting} = {address}: without a cluster secret only loopback addresses"
                    " are allowed; set cluster_secret_file or KVT_CLUSTER_SECRET"
                )

    def _check_advertise(self, listen: Address, peers: Mapping[str, Address]) -> None:
        if not self.advertise:
            if listen.is_wildcard:
                raise ConfigError(
                    f"advertise must be set, because listen = {listen} is not an address"
                    " that peers can connect to"
                )
            reached = listen
        else:
            reached = parse_address(self.advertise, "advertise")
            if reached.is_wildcard:
                raise ConfigError(f"advertise = {reached} is not an address to connect to")
        remote = [str(address) for address in peers.values() if not address.is_loopback]
        if reached.is_loopback and remote:
            raise ConfigError(
                f"{'advertise' if self.advertise else 'listen'} = {reached} can't be reached"
                f" from peer {remote[0]}; use this machine's address"
            )


def peers_from_config(peers: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Name -> address; a plain list gets its addresses as names."""
    if isinstance(peers, str):
        raise ConfigError(f"peers must be a list or a mapping, not {peers!r}")
    return dict(peers) if isinstance(peers, Mapping) else {at: at for at in peers}


class ControlPlane:
    """See the module."""

    def __init__(
        self,
        settings: ControlSettings,
        identity: EngineIdentity,
        ledger: Ledger,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.ledger = ledger
        self.address = ""
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._status: dict[str, Callable[[], Any]] = {}
        self._work: deque[Callable[[], None]] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._links: dict[str, PeerLink] = {}
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._server = LeaseServer(
            identity, ledger, rate_per_s=settings.rate_per_s, status=self.status, clock=clock
        )
        self._client = LeaseClient(
            identity.engine_id,
            group_tokens=ledger.settings.group_tokens,
            lease_s=settings.lease_s,
            clock=clock,
        )
        self._client.on_release = self._post_release

    # -- any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and start the thread; ``ConfigError`` if the address can't be used."""
        if self._thread is not None:
            raise ClosedError("the control plane was already started")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = self.settings.secret.curve_keys() if self.settings.secret else None
        self._zap = ZapHandler(self._context, self._keys) if self._keys else None
        self._wake = Wake()
        self._poller = zmq.Poller()
        try:
            self._router = self._bind()
        except zmq.ZMQError as error:
            self._context.destroy(0)
            self._wake.close()
            raise ConfigError(f"listen = {self.settings.listen}: {error}") from None
        self._watch(self._router, self._on_router)
        self._watch(self._wake.fileno(), self._on_wake)
        if self._zap is not None:
            self._watch(self._zap.socket, self._zap.handle)
        for name, address in self.settings.peers.items():
            self._add_link(name, address)
        name = f"kvt-control-{self.identity.engine_id[:32]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Give every lease back and end the thread.  Calls after the first do nothing."""
        if self._thread is None or self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("control thread still busy: engine_id=%s", self.identity.engine_id)

    def set_agents(self, agents: Mapping[int, bytes]) -> None:
        """Publish data-plane metadata by rank.  Before the first call peers see "not ready"."""
        self._server.set_agents(agents)

    def add_status(self, name: str, source: Callable[[], Any]) -> None:
        """Show ``source()``, plain values, as ``name`` in ``kvt status``; called in the control thread."""
        self._status[name] = source

    def lookup(
        self,
        chain: DigestChain,
        *,
        ask: Sequence[str] | None = None,
        handoff_request_id: str = "",
        min_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Start to look for the longest prefix of ``chain`` at peers; poll the answer.

        ``ask`` names peers by configured name, address, engine id or signed
        address; others are ignored and counted.  ``None`` asks all.  Leases of
        no more than ``min_tokens`` tokens are not wanted.
        """
        timeout_s = self.settings.lookup_timeout_s if deadline_s is None else deadline_s
        targets = None if ask is None else tuple(ask)
        lookup = Lookup(chain, targets, handoff_request_id[:512], min_tokens, timeout_s, self._clock)
        if self._closing or self._thread is None:
            lookup.settle(None, "closed")
        else:
            self._post(lambda: self._begin(lookup))
        return lookup

    def discard_handoff(self, peer: str, request_id: str) -> None:
        """Tell a peer that nobody will fetch this handoff.  A lost message costs its TTL."""
        self._post(lambda: self._discard(peer, request_id))

    def peers(self) -> list[dict[str, Any]]:
        """State, reason, identity and last round-trip time of every peer."""
        now = self._clock()
        return [link.snapshot(now) for link in list(self._links.values())]

    def status(self) -> dict[str, Any]:
        """What ``kvt status`` shows."""
        return {
            "engine_id": self.identity.engine_id,
            "incarnation": self.identity.incarnation,
            "address": self.address,
            "protocol_version": protocol.PROTOCOL_VERSION,
            "encrypted": self.settings.secret is not None,
            "fingerprint": dict(self.identity.fingerprint),
            "versions": dict(self.identity.versions),
            "ledger": self.ledger.snapshot(),
            "peers": self.peers(),
            "server": dict(self._server.counters),
            "client": self._client.snapshot(),
            "control": dict(self.counters),
            **{name: source() for name, source in list(self._status.items())},
        }

    def _post(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._wake.set()

    def _post_release(self, lease: HeldLease, delivered: bool) -> None:
        if threading.current_thread() is self._thread:
            self._client.release(lease, delivered)
        else:
            self._post(lambda: self._client.release(lease, delivered))

    # -- control thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for ready, _ in self._poller.poll(self._timeout_ms()):
                    self._guarded(self._handlers.get(ready))
                self._guarded(self._tick)
        finally:
            self._shut()

    def _guarded(self, handler: Callable[[], None] | None) -> None:
        """The control loop's edge: one bad message or peer must not end the service."""
        if handler is None:
            return
        try:
            handler()
        except Exception:
            self.counters["loop.error"] += 1
            logger.exception("control loop: engine_id=%s", self.identity.engine_id)

    def _timeout_ms(self) -> float:
        due = [link.next_s() for link in self._links.values()]
        timer = self._client.next_s()
        if timer is not None:
            due.append(timer)
        if not due:
            return 1000.0
        return min(1000.0, max(0.0, math.ceil((min(due) - self._clock()) * 1000)))

    def _tick(self) -> None:
        now = self._clock()
        self._client.tick(now)
        for link in list(self._links.values()):
            before = link.state
            if link.next_s() <= now:
                link.tick(now, self._client.next_id())
            if link.state != before:
                self._after_change(link, before)

    def _on_wake(self) -> None:
        self._wake.clear()
        while self._work:
            self._guarded(self._work.popleft())

    def _on_router(self) -> None:
        for _ in range(_BATCH):
            try:
                client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            reply = self._server.handle(client, frames)
            if reply is not None:
                # A reader that went away or does not read loses its answer, nobody waits.
                with suppress(zmq.ZMQError):
                    self._router.send_multipart((client, reply), zmq.NOBLOCK)

    def _on_link(self, link: PeerLink) -> None:
        for _ in range(_BATCH):
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._on_answer(link, frames)

    def _on_answer(self, link: PeerLink, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames")
            message = protocol.decode_to_reader(frames[0])
        except protocol.VersionMismatch as error:
            before = link.state
            link.refuse(str(error), self._clock())
            self._after_change(link, before)
            return
        except ProtocolError as error:
            self.counters["answer.malformed"] += 1
            logger.warning("malformed answer: peer=%s error=%s", link.name, error)
            return
        if isinstance(message, protocol.HelloReply):
            self._on_hello(link, message)
        else:
            self._client.on_message(link, message)

    def _on_hello(self, link: PeerLink, reply: protocol.HelloReply) -> None:
        now, before = self._clock(), link.state
        renewed = link.answered(reply, now)
        if link.usable or link.state == "not_ready":
            self._check_identity(link, reply, now)
        if renewed:
            self.counters["peer.new_incarnation"] += 1
            self._client.link_lost(link, incarnation_gone=True)
        self._after_change(link, before)

    def _check_identity(self, link: PeerLink, reply: protocol.HelloReply, now: float) -> None:
        """One engine id must mean one process, and must not be our own."""
        if reply.engine_id == self.identity.engine_id:
            own = reply.incarnation == self.identity.incarnation
            link.refuse("this is me" if own else "another engine uses my engine id", now)
            return
        for other in self._links.values():
            peer = other.peer
            if other is link or peer is None or peer.engine_id != reply.engine_id:
                continue
            if other.state not in ("connected", "not_ready"):
                if peer.incarnation != reply.incarnation:
                    self._client.link_lost(other, incarnation_gone=True)
                continue
            if peer.incarnation == reply.incarnation:
                link.refuse(f"same engine as {other.address}", now)
            else:
                link.refuse(
                    f"engine id {reply.engine_id!r} is also used at {other.address}"
                    f" by incarnation {peer.incarnation}, here {reply.incarnation}",
                    now,
                )

    def _after_change(self, link: PeerLink, before: str) -> None:
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

    def _on_monitor(self, link: PeerLink) -> None:
        before = link.state
        link.on_monitor(self._clock())
        self._after_change(link, before)

    # -- peers -------------------------------------------------------------------------------------

    def _begin(self, lookup: Lookup) -> None:
        if not lookup.settled:
            self._client.begin(lookup, self._targets(lookup.targets))

    def _targets(self, names: tuple[str, ...] | None) -> list[PeerLink]:
        if names is None:
            return list(self._links.values())
        found: dict[str, PeerLink] = {}
        for name in names:
            link = self._resolve(name)
            if link is None:
                self.counters["ask.unknown_peer"] += 1
            else:
                found[link.address] = link
        return list(found.values())

    def _resolve(self, name: str) -> PeerLink | None:
        """A link by address, configured name, engine id or signed address."""
        if name in self._links:
            return self._links[name]
        named = [
            link
            for link in self._links.values()
            if link.name == name or (link.peer is not None and link.peer.engine_id == name)
        ]
        if named:
            return next((link for link in named if link.usable), named[0])
        secret = self.settings.secret
        if secret is None or not is_address_token(name):
            return None
        try:
            address = str(parse_address(verify_address(secret, name), "address token"))
        except (AuthenticationError, ConfigError):
            self.counters["ask.bad_token"] += 1
            return None
        return self._links.get(address) or self._add_dynamic(address)

    def _add_dynamic(self, address: str) -> PeerLink | None:
        configured = {str(parse_address(at, "peers")) for at in self.settings.peers.values()}
        dynamic = [link for at, link in self._links.items() if at not in configured]
        if len(dynamic) >= self.settings.max_dynamic_peers:
            oldest = min(dynamic, key=lambda link: link.last_used)
            self._drop_link(oldest)
        return self._add_link(address, address)

    def _discard(self, peer: str, request_id: str) -> None:
        link = self._resolve(peer)
        if link is None or link.peer is None:
            self.counters["discard.unknown_peer"] += 1
        elif not link.send(protocol.Discard(link.peer.incarnation, request_id)):
            self.counters["discard.unsent"] += 1

    def _add_link(self, name: str, address: str) -> PeerLink:
        address = str(parse_address(address, f"peers[{name}]"))
        link = PeerLink(
            self._context,
            name,
            address,
            self.identity,
            advertise=self.address,
            keys=self._keys,
            times=self.settings.hello,
            clock=self._clock,
        )
        self._links[address] = link
        self._watch(link.socket, lambda: self._on_link(link))
        self._watch(link.monitor, lambda: self._on_monitor(link))
        return link

    def _drop_link(self, link: PeerLink) -> None:
        self._client.link_lost(link, incarnation_gone=True)
        del self._links[link.address]
        for socket in (link.socket, link.monitor):
            self._poller.unregister(socket)
            del self._handlers[socket]
        link.close()

    # -- sockets -----------------------------------------------------------------------------------

    def _watch(self, socket: Any, handler: Callable[[], None]) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def _bind(self) -> zmq.Socket[bytes]:
        listen = parse_address(self.settings.listen, "listen", allow_port_0=True)
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, self.settings.max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1000)
        # A client that connects and says nothing is cut off after this.
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        socket.setsockopt(zmq.IPV6, int(":" in listen.host))
        if self._keys is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, b"kvtransport")
            socket.curve_server = True
            socket.curve_secretkey = self._keys.server_secret
            socket.curve_publickey = self._keys.server_public
        # libzmq spells "any port" as *, not 0.
        host = str(Address(listen.host, 1)).rsplit(":", 1)[0]
        socket.bind(f"{host}:{listen.port or '*'}")
        bound = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        port = bound.rsplit(":", 1)[1]
        self.address = self.settings.advertise or f"{host}:{port}"
        return socket

    def _shut(self) -> None:
        self._on_wake()
        self._client.abandon_all()
        for link in list(self._links.values()):
            # Releases are worth a moment; what does not leave in it costs one lease.
            link.socket.linger = 200
            link.socket.disable_monitor()
            link.monitor.close(0)
            link.socket.close()
        if self._zap is not None:
            self._zap.socket.close(0)
        self._router.close(0)
        self._context.term()
        self._wake.close()
