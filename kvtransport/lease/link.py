"""The reader's connection to one peer address: handshake, back-off, identity.

States
    ``connecting``   no hello answered yet
    ``not_ready``    answered, but without data-plane metadata so far
    ``connected``    may be asked
    ``incompatible`` answered, but KV must not be exchanged (``reason``)
    ``down``         not reachable; tried again after ``retry_at``

Threading
    The control thread only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtransport.errors import IncompatiblePeerError
from kvtransport.lease import protocol
from kvtransport.lease.held import PeerEngine
from kvtransport.lease.identity import EngineIdentity, compare
from kvtransport.lease.security import CurveKeys

MAX_REPLY_NBYTES = 256 * 2**20
"""A reply carries the data-plane metadata of all of an engine's ranks."""

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECT_RETRIED
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """When to say hello, and when to give up on an answer; seconds."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    not_ready_s: float = 0.1
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0


@dataclass(slots=True)
class Hello:
    """The hello that waits for its answer."""

    request_id: int
    sent: float


@dataclass(frozen=True, slots=True)
class PeerState:
    """What is known about the peer at one address.

    ``state`` is one of the module's states, ``reason`` says why it is not
    ``connected``.  ``rtt_s`` is the last hello's round trip, ``None`` before.
    """

    name: str
    address: str
    state: str
    reason: str
    engine_id: str
    incarnation: str
    ranks: tuple[int, ...]
    versions: Mapping[str, str]
    rtt_s: float | None
    retry_in_s: float


class PeerLink:
    """One DEALER socket to one address, and what is known about who answers there."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        address: str,
        identity: EngineIdentity,
        *,
        advertise: str,
        keys: CurveKeys | None,
        times: LinkTimes,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.address = address
        self.state = "connecting"
        self.reason = ""
        self.peer: PeerEngine | None = None
        self.rtt_s: float | None = None
        self.retry_at = clock()
        self.last_used = clock()
        self._identity = identity
        self._advertise = advertise
        self._times = times
        self._clock = clock
        self._revision = -1
        self._failures = 0
        self._hello: Hello | None = None
        self._wired = False
        self.socket = dealer(context, address, keys)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is the configured name or the engine id."""
        return name == self.name or (self.peer is not None and name == self.peer.engine_id)

    @property
    def usable(self) -> bool:
        return self.state == "connected"

    @property
    def hopeful(self) -> bool:
        """Whether it may become usable soon enough to wait for."""
        return self.state == "not_ready" or (self.state == "connecting" and self._failures < 3)

    def send(self, message: protocol.ToOwner) -> bool:
        """Send without waiting; False when there is no connection or its queue is full."""
        try:
            self.socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    # -- hello -----------------------------------------------------------------------

    def next_s(self) -> float:
        """When ``tick`` wants to be called."""
        return self._hello.sent + self._times.timeout_s if self._hello else self.retry_at

    def tick(self, now: float, request_id: int) -> bool:
        """Say hello when it is time; True if that used ``request_id``."""
        if self._hello is not None:
            if now >= self._hello.sent + self._times.timeout_s:
                self.failed(now, "no answer to hello (not an engine, or another cluster secret?)")
            return False
        if now < self.retry_at:
            return False
        hello = protocol.Hello(
            request_id,
            self._identity.engine_id,
            self._identity.incarnation,
            self._advertise,
            dict(self._identity.fingerprint),
            dict(self._identity.versions),
            self._revision,
        )
        if not self.send(hello):
            self.failed(now, "not reachable (nobody there, or another cluster secret?)")
            return False
        self._hello = Hello(request_id, now)
        return True

    def hello_soon(self, now: float) -> None:
        """Ask again who is there: the peer's identity is in doubt."""
        if self._hello is None:
            self.retry_at = now

    def failed(self, now: float, reason: str) -> None:
        """Go down and try again after a back-off with jitter."""
        self._hello = None
        self._failures += 1
        backoff = min(
            self._times.backoff_max_s, self._times.backoff_min_s * 2 ** min(self._failures, 16)
        )
        self.retry_at = now + backoff * random.uniform(0.5, 1.0)  # noqa: S311  # jitter
        if self.state != "connecting" or self._failures >= 3:
            self.state = "down"
        self.reason = reason

    def answered(self, reply: protocol.HelloReply, now: float) -> bool:
        """Take in a hello's answer; True if another incarnation answers here now."""
        if self._hello is None or reply.request_id != self._hello.request_id:
            return False
        self.rtt_s = now - self._hello.sent
        self._hello, self._failures = None, 0
        before = self.peer
        changed = before is not None and before.incarnation != reply.incarnation
        same = before is not None and not changed
        if reply.agents is not None or not same:
            self.peer = self._engine(reply, reply.agents or {})
            # A reply without agents is only complete if we knew them already.
            self._revision = reply.revision if reply.agents is not None else -1
        complete = reply.ready and self._revision == reply.revision
        try:
            compare(self._identity.fingerprint, reply.fingerprint)
        except IncompatiblePeerError as error:
            self.refuse(str(error), now)
            return changed
        self.state, self.reason = ("connected", "") if complete else ("not_ready", "")
        self.retry_at = now + (self._times.interval_s if complete else self._times.not_ready_s)
        return changed

    def refuse(self, reason: str, now: float) -> None:
        """The peer is there but must not be asked."""
        self._hello = None
        self.state, self.reason = "incompatible", reason
        self.retry_at = now + self._times.backoff_max_s

    def _engine(self, reply: protocol.HelloReply, agents: Mapping[int, bytes]) -> PeerEngine:
        return PeerEngine(
            reply.engine_id,
            reply.incarnation,
            self.name,
            self.address,
            MappingProxyType(dict(agents)),
            MappingProxyType(dict(reply.versions)),
        )

    # -- connection events --------------------------------------------------------------

    def on_monitor(self, now: float) -> bool:
        """Read connection events; True if the connection was lost."""
        lost = False
        while True:
            try:
                frames = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return lost
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hello = None
                self.retry_at = now
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.failed(now, "refused: other cluster secret")
            elif event == zmq.EVENT_DISCONNECTED:
                lost = lost or self.state in ("connected", "not_ready", "incompatible")
                if lost:
                    self.failed(now, "connection lost")

    def snapshot(self, now: float) -> PeerState:
        """May be called from any thread."""
        peer = self.peer
        return PeerState(
            self.name,
            self.address,
            self.state,
            self.reason,
            peer.engine_id if peer else "",
            peer.incarnation if peer else "",
            tuple(sorted(peer.agents)) if peer else (),
            dict(peer.versions) if peer else {},
            self.rtt_s,
            max(0.0, self.retry_at - now),
        )


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: CurveKeys | None
) -> zmq.Socket[bytes]:
    """A socket that connects, and connects again, to a control plane."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_NBYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
    socket.connect(address)
    return socket
