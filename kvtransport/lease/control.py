"""The control plane of one engine: serves its ledger and asks its peers.

Architecture
    One thread runs the owner's ROUTER socket (``server``), the links to peers
    (``peers``), the reader's book-keeping (``client``) and, with a cluster
    secret, the check of client keys (``zap``).  Other threads hand over work
    through a queue and are never made to wait.

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
from dataclasses import asdict
from typing import Any

import zmq

from kvtransport.errors import AuthenticationError, ClosedError, ConfigError
from kvtransport.lease import protocol
from kvtransport.lease.address import Address, parse_address
from kvtransport.lease.client import LeaseClient
from kvtransport.lease.digest import DigestChain
from kvtransport.lease.held import HeldLease, Lookup, PeerEngine
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.ledger import Ledger
from kvtransport.lease.link import PeerState
from kvtransport.lease.peers import Peers, Socket
from kvtransport.lease.security import CurveKeys, sign_address, verify_address
from kvtransport.lease.server import LeaseServer
from kvtransport.lease.settings import ControlSettings, peers_from_config
from kvtransport.lease.wake import Wake
from kvtransport.lease.zap import ZapHandler

__all__ = ["ControlPlane", "ControlSettings", "peers_from_config"]

logger = logging.getLogger("kvtransport.lease.control")

_BATCH = 128
"""Messages taken from one socket before the others get their turn."""

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_WARN_EVERY_S = 60.0

_LINGER_MS = 200
"""At close, releases get this long to leave; what does not costs one lease."""


class ControlPlane:
    """See the module.  Every method but ``close`` returns without waiting."""

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
        self._warn_again_s = -math.inf
        self._thread: threading.Thread | None = None
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._server = LeaseServer(
            identity, ledger, rate_per_s=settings.rate_per_s, status=self.status, clock=clock
        )
        self._client = LeaseClient(
            identity.engine_id,
            group_tokens=ledger.settings.group_tokens,
            lease_s=settings.lease_s,
            clock=clock,
            release=self._post_release,
        )
        self._peers = Peers(settings, identity, self._client, clock)

    # -- any thread -----------------------------------------------------------------

    def start(self) -> None:
        """Bind and start the thread; ``ConfigError`` if the address can't be used."""
        if self._thread is not None:
            raise ClosedError("the control plane was already started")
        keys = self.settings.secret.curve_keys() if self.settings.secret else None
        self._context: zmq.Context[Socket] = zmq.Context()
        self._zap = ZapHandler(self._context, keys) if keys else None
        self._wake = Wake()
        self._poller = zmq.Poller()
        try:
            self._router = self._bind(keys)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            self._wake.close()
            raise ConfigError(f"listen = {self.settings.listen}: {error}") from None
        self._watch(self._router, self._on_router)
        self._refusals = self._router.get_monitor_socket(_REFUSALS)
        self._watch(self._refusals, self._on_refusal)
        self._watch(self._wake.fileno(), self._on_wake)
        if self._zap is not None:
            self._watch(self._zap.socket, self._zap.handle)
        self._peers.open(self._context, keys, self.address, self._watch, self._unwatch)
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
        """Show what ``source`` returns, plain values, as ``name`` in ``kvt status``.

        It is called in the control thread.
        """
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

        ``ask`` names peers by configured name, address or engine id; others are
        ignored and counted.  ``None`` asks all.  Leases of no more than
        ``min_tokens`` tokens are not wanted.  ``deadline_s`` seconds from now
        there is an answer in any case; by default ``lookup_timeout_s``.
        """
        timeout_s = self.settings.lookup_timeout_s if deadline_s is None else deadline_s
        targets = None if ask is None else tuple(ask)
        if len(handoff_request_id) > protocol.MAX_REQUEST_NAME:
            handoff_request_id = ""
        lookup = Lookup(chain, targets, handoff_request_id, min_tokens, timeout_s, self._clock)
        if self._closing or self._thread is None:
            lookup.finish("closed")
        else:
            self._post(lambda: self._begin(lookup))
        return lookup

    def discard_handoff(self, peer: str, request_id: str) -> None:
        """Tell a peer that nobody will fetch this handoff.  A lost message costs its TTL."""
        if len(request_id) <= protocol.MAX_REQUEST_NAME:
            self._post(lambda: self._discard(peer, request_id))

    def address_token(self) -> str:
        """What lets peers with the same secret ``admit`` this engine; empty without one."""
        secret = self.settings.secret
        return sign_address(secret, self.address) if secret else ""

    def admit(self, address: str, token: str) -> bool:
        """Connect to an engine that is not configured, if our secret signed its address.

        False, and counted, if it did not.
        """
        parsed = self._verified(address, token)
        if parsed is None:
            self.counters["admit.refused"] += 1
            return False
        self._post(lambda: self._peers.admit(str(parsed)))
        return True

    def _verified(self, address: str, token: str) -> Address | None:
        if self.settings.secret is None:
            return None
        try:
            verify_address(self.settings.secret, address, token)
            return parse_address(address, "address")
        except (AuthenticationError, ConfigError):
            return None

    def engines(self) -> list[PeerEngine]:
        """The peers that may be asked now, with their data-plane metadata."""
        return self._peers.engines()

    def peers(self) -> list[PeerState]:
        """State, reason, identity and last round-trip time of every peer."""
        return self._peers.states()

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
            "peers": [asdict(peer) for peer in self.peers()],
            "server": dict(self._server.counters),
            "client": self._client.snapshot(),
            "control": {**self.counters, **self._peers.counters},
            **{name: source() for name, source in list(self._status.items())},
        }

    def _post(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._wake.set()

    def _post_release(self, lease: HeldLease, delivered: bool) -> None:
        if threading.current_thread() is self._thread:
            self._client.give_back(lease, delivered)
        else:
            self._post(lambda: self._client.give_back(lease, delivered))

    # -- control thread -------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for ready, _ in self._poller.poll(self._timeout_ms()):
                    self._guarded(self._handlers.get(ready))
                self._guarded(self._tick)
        finally:
            self._shut()

    def _guarded(self, handler: Callable[[], None] | None) -> None:
        """Call ``handler``; one bad message or peer must not end the service."""
        if handler is None:
            return
        try:
            handler()
        except Exception:
            self.counters["loop.error"] += 1
            logger.exception("control loop: engine_id=%s", self.identity.engine_id)

    def _timeout_ms(self) -> int:
        now = self._clock()
        due = [at for at in (self._client.next_s(), self._peers.next_s()) if at is not None]
        return min(1000, max(0, math.ceil((min(due, default=now + 1) - now) * 1000)))

    def _tick(self) -> None:
        now = self._clock()
        self._client.tick(now)
        self._peers.tick(now)

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

    def _on_refusal(self) -> None:
        """Somebody connected who is no engine or has another secret; port scans too."""
        self._refusals.recv_multipart(zmq.NOBLOCK)
        self.counters["connection.refused"] += 1
        now = self._clock()
        if now >= self._warn_again_s:
            self._warn_again_s = now + _WARN_EVERY_S
            logger.warning(
                "connection refused: no engine, or another cluster secret: engine_id=%s total=%d",
                self.identity.engine_id,
                self.counters["connection.refused"],
            )

    def _begin(self, lookup: Lookup) -> None:
        self._client.begin(lookup, self._peers.resolve(lookup.targets))

    def _discard(self, peer: str, request_id: str) -> None:
        for link in self._peers.resolve([peer]):
            engine = link.peer
            if engine is None or not link.send(protocol.Discard(engine.incarnation, request_id)):
                self.counters["discard.unsent"] += 1

    # -- sockets --------------------------------------------------------------------

    def _watch(self, socket: Socket | int, handler: Callable[[], None]) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def _unwatch(self, socket: Socket | int) -> None:
        self._poller.unregister(socket)
        del self._handlers[socket]

    def _bind(self, keys: CurveKeys | None) -> Socket:
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
        if keys is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, b"kvtransport")
            socket.curve_server = True
            socket.curve_secretkey = keys.server_secret
            socket.curve_publickey = keys.server_public
        # libzmq spells "any port" as *, not 0.
        host = str(Address(listen.host, 1)).rsplit(":", 1)[0]
        socket.bind(f"{host}:{listen.port or '*'}")
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        port = bound.decode().rstrip("\0").rsplit(":", 1)[1]
        self.address = self.settings.advertise or f"{host}:{port}"
        return socket

    def _shut(self) -> None:
        self._on_wake()
        self._client.abandon_all()
        self._peers.close(_LINGER_MS)
        if self._zap is not None:
            self._zap.socket.close(0)
        self._router.disable_monitor()
        self._refusals.close(0)
        self._router.close(0)
        self._context.term()
        self._wake.close()
