"""The host backend: the ``Backend`` methods, each a few lines over its parts.

Architecture
    READ on one machine copies from the peer's memory; nobody there takes part.
    Everything else (WRITE, notifications, READ over TCP) is a request that a
    thread of the *target* answers, so the target checks bounds, access and
    registration itself.  Writing straight into another process is deliberately
    not done: a write cannot be discarded when its region turns out to be gone.

Threads
    One listener; one serving thread per connection; one lane per peer.  Small
    vm reads run inside ``post``.  All are daemons with bounded waits, and the
    engine's loop is never needed to serve a peer.

Quiet
    A READ is over once our thread left its last system call (and closed the
    connection, over TCP).  A WRITE is over once the target said so or closed
    the connection; while it is frozen, nothing is reported.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtransport.backend import (
    Backend,
    BackendInfo,
    Blocks,
    Completion,
    Event,
    Notification,
    Op,
    PeerDown,
    Probe,
    RegionSpec,
)
from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    BackendUnavailableError,
    BackpressureError,
    ClosedError,
    IncompatiblePeerError,
    KVTransportError,
    PeerLostError,
    TransferCancelledError,
    UnsupportedError,
)
from kvtransport_backends.host import INFO, _body, _fork, _sys
from kvtransport_backends.host._counters import Counters
from kvtransport_backends.host._handshake import Caller
from kvtransport_backends.host._identity import yama_scope
from kvtransport_backends.host._job import Job, cancelled_error
from kvtransport_backends.host._lane import Lane, Shared
from kvtransport_backends.host._plan import make_plan
from kvtransport_backends.host._probe import probe
from kvtransport_backends.host._reach import reach
from kvtransport_backends.host._server import Server
from kvtransport_backends.host._table import RegionTable
from kvtransport_backends.host._wire import MAX_NOTIFY_BYTES, Status
from kvtransport_backends.host.config import HostConfig

_log = logging.getLogger("kvtransport.backends.host")

_EXIT_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Peer:
    agent_id: bytes
    token: bytes
    table: RegionTable
    lane: Lane


class HostBackend(Backend):
    """Moves host memory by ``process_vm_readv`` and TCP; see the module's text."""

    info: ClassVar[BackendInfo] = INFO

    def __init__(self) -> None:
        self._server: Server | None = None
        self._closed = False
        self._config = HostConfig()
        self._counters = Counters()
        self._peers: dict[int, _Peer] = {}
        self._retired: list[Lane] = []
        self._jobs: dict[int, Job] = {}
        self._events: deque[Event] = deque()
        self._inbox_lock = threading.Lock()
        self._unread = 0

    @classmethod
    def probe(cls, config: HostConfig) -> Probe:
        return probe(config)

    @classmethod
    def capabilities(cls, config: HostConfig) -> Capabilities:
        # A vm READ asks nobody at the target, so only path "tcp" can promise this.
        enforced: frozenset[Literal["bounds", "access", "stale_key"]] = frozenset()
        if config.path == "tcp":
            enforced = frozenset({"bounds", "access", "stale_key"})
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=frozenset({("host", "host")}),
            notify="inline",
            notify_after_data=True,
            cancel="drain",
            failure_detection="keepalive",
            detection_bound_s=config.stall_timeout_s + config.handshake_timeout_s,
            progress="auto",
            target_enforces=enforced,
            max_regions=config.max_regions,
            max_notify_bytes=MAX_NOTIFY_BYTES,
            max_in_flight=config.max_in_flight,
            path_evidence=(
                "vm_read_bytes",
                "vm_write_bytes",
                "tcp_read_bytes",
                "tcp_write_bytes",
            ),
        )

    def open(self, name: str, config: HostConfig) -> None:
        found = probe(config)
        if not found.available:
            raise BackendUnavailableError(found.reason, hint=found.hint, backend="host")
        if config.allow_ptracer and config.path != "tcp" and yama_scope() == 1:
            _allow_ptracer()
        self._config = config
        self._server = server = Server(config, self, self._counters)
        self._shared = Shared(
            server.own,
            config,
            self._counters,
            self,
            threading.BoundedSemaphore(config.copy_threads),
        )
        atexit.register(self._close_at_exit)
        _fork.close_in_child(self)
        _log.debug("host agent %s open, path %s", name, config.path)

    def _opened(self) -> Server:
        if self._server is None or self._closed:
            raise ClosedError("the host backend is not open", backend="host")
        return self._server

    # -- memory and peers --------------------------------------------------

    def register(self, region: RegionSpec) -> None:
        self._opened().regions.add(region)

    def deregister(self, region_id: int) -> None:
        self._opened().regions.remove(region_id)

    def export(self) -> bytes:
        return _body.encode(self._opened().body())

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self._opened()
        decoded = _body.decode(body)
        table = RegionTable(decoded.regions)
        known = self._peers.get(peer_id)
        if known is None:
            lane = reach(peer_id, decoded, self._shared)
            with self._inbox_lock:
                self._peers[peer_id] = _Peer(decoded.agent_id, decoded.token, table, lane)
        elif known.agent_id != decoded.agent_id:
            raise IncompatiblePeerError(
                f"peer {peer_id} is agent {known.agent_id.hex()}, "
                f"the new metadata describes agent {decoded.agent_id.hex()}",
                backend="host",
            )
        else:
            self._check_alive(known)
            known.table = table

    def drop_peer(self, peer_id: int) -> None:
        with self._inbox_lock:
            peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        peer.lane.stop()
        # Joined by ``close``: waiting here could take as long as a connect.
        self._retired = [lane for lane in self._retired if not lane.join(0)]
        self._retired.append(peer.lane)

    def _check_alive(self, peer: _Peer) -> None:
        if peer.lane.lost:
            raise PeerLostError(str(peer.lane.lost), backend="host")

    # -- transfers ---------------------------------------------------------

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        server = self._opened()
        peer = self._peers.get(peer_id)
        if peer is None:
            raise PeerLostError(f"peer {peer_id} is not imported", backend="host")
        self._check_alive(peer)
        if len(self._jobs) >= self._config.max_in_flight:
            raise BackpressureError(
                f"{len(self._jobs)} transfers are in flight: max_in_flight", backend="host"
            )
        if notify is not None and len(notify) > MAX_NOTIFY_BYTES:
            raise UnsupportedError(
                f"a notification of {len(notify)} bytes exceeds {MAX_NOTIFY_BYTES}",
                capability="max_notify_bytes",
                backend="host",
            )
        chunk_bytes = self._config.chunk_bytes
        plan = make_plan(blocks, op, server.regions.table, peer.table, chunk_bytes)
        job = Job(ticket, op, plan, notify)
        self._jobs[ticket] = job
        inline = op is Op.READ and notify is None and plan.total <= self._config.inline_bytes
        if not (inline and peer.lane.read_inline(job)):
            peer.lane.submit(job)

    def cancel(self, ticket: int) -> None:
        job = self._jobs.get(ticket)
        if job and job.cancel():
            self.finish(job, cancelled_error(ticket))

    def finish(self, job: Job, error: KVTransportError | None) -> None:
        """Called by lanes: ``job`` is over and quiet."""
        self._jobs.pop(job.ticket, None)
        cancelled = isinstance(error, TransferCancelledError)
        self._events.append(Completion(job.ticket, error, cancelled))

    def lose(self, job: Job) -> None:
        """Called by lanes: ``job`` ended in doubt; its memory is the core's to keep."""
        self._jobs.pop(job.ticket, None)

    def peer_down(self, lane: Lane, error: KVTransportError) -> None:
        """Called by lanes: their peer is gone."""
        peer = self._peers.get(lane.peer_id)
        if peer and peer.lane is lane:
            _log.debug("host peer %d is down: %s", lane.peer_id, error)
            self._events.append(PeerDown(lane.peer_id, error))

    def deliver(self, caller: Caller, payload: bytes) -> Status:
        """Called by serving threads: a notification arrived, after its data."""
        with self._inbox_lock:
            peer_id = self._sender(caller)
            if peer_id is None:
                return Status.UNKNOWN_SENDER
            if self._unread >= self._config.max_notifications:
                return Status.INBOX_FULL
            self._unread += 1
            self._events.append(Notification(peer_id, payload))
        self._counters.add("notifications_received")
        return Status.OK

    def _sender(self, caller: Caller) -> int | None:
        # The newest first: a peer that was lost may have been imported again.
        for peer_id, peer in reversed(self._peers.items()):
            if peer.agent_id == caller.agent_id and caller.proves(peer.token):
                return peer_id
        return None

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        if not events and self._jobs:
            # A caller that polls in a tight loop would keep the interpreter lock
            # from the lane that it waits for.  Linux makes this some 50 us, which a
            # shorter way of giving up the lock does not replace: measured, the
            # lane then still waits for the interpreter's switch interval of 5 ms.
            time.sleep(0)
        read = sum(isinstance(event, Notification) for event in events)
        if read:
            with self._inbox_lock:
                self._unread -= read
        return events

    def counters(self) -> Mapping[str, int]:
        return self._counters.snapshot()

    # -- the end -----------------------------------------------------------

    def close(self) -> None:
        self._close(self._config.close_timeout_s)

    def _close_at_exit(self) -> None:
        self._close(_EXIT_TIMEOUT_S)

    def _close(self, timeout_s: float) -> None:
        if self._closed or self._server is None:
            self._closed = True
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        lanes = [*self._retired, *(peer.lane for peer in self._peers.values())]
        for lane in lanes:
            lane.stop()
        in_time = self._server.close(deadline)
        for lane in lanes:
            in_time = lane.join(deadline - time.monotonic()) and in_time
        if not in_time:
            _log.warning("host backend: a thread did not end within %g s of close", timeout_s)
        atexit.unregister(self._close_at_exit)
        _fork.forget(self)

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, leave the parent's alone."""
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if self._server:
            self._server.abandon()
        for lane in [*self._retired, *(peer.lane for peer in self._peers.values())]:
            lane.abandon()


def _allow_ptracer() -> None:
    try:
        _sys.allow_any_ptracer()
    except OSError as error:
        raise BackendUnavailableError(
            f"allow_ptracer is set, but PR_SET_PTRACER is refused: {error.strerror}",
            hint="unset allow_ptracer",
            backend="host",
        ) from error
