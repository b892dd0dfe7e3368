"""The agent: one per engine process and backend, and what users call.

Architecture
    ``Agent`` owns one opened backend, the local regions, the imported peers and
    all transfers.  ``kvtransport.plan`` checks and merges, ``kvtransport.inflight``
    keeps the states, ``kvtransport.events`` holds what the user has not read.

Lifecycle
    ``open`` - ``register`` - ``metadata`` / ``add_peer`` - ``read`` / ``write`` -
    ``close``.  Use after ``close`` raises ``ClosedError``, after fork ``ForkError``.

Threading
    Every method may be called from any thread, except when the backend declares
    ``threading = "single"``: then only from the one that opened it.  One lock
    guards everything and is never held while waiting.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from secrets import token_bytes
from time import monotonic
from typing import Any, Self

from kvtransport import edge, lifetime, registry
from kvtransport.backend import Backend, Op
from kvtransport.capabilities import Capabilities
from kvtransport.config import backend_config, resolve
from kvtransport.ending import drain_until, release_all
from kvtransport.errors import (
    BackendUnavailableError,
    ClosedError,
    ConfigError,
    KVTransportError,
    TransferFailedError,
    UndrainedError,
)
from kvtransport.events import Event, EventQueue, NotificationEvent, TransferEvent
from kvtransport.gate import Gate
from kvtransport.inflight import InFlight
from kvtransport.layout.blocks import AnyPair
from kvtransport.metadata import INCARNATION_BYTES, Body, Header, encode
from kvtransport.options import AgentOptions
from kvtransport.peer import Peer, PeerState
from kvtransport.peers import PeerTable
from kvtransport.plan import Plan
from kvtransport.planner import make_plan
from kvtransport.posting import Posting
from kvtransport.progress import Progress
from kvtransport.region import Region
from kvtransport.regions import RegionTable
from kvtransport.stats import AgentStats, Counters
from kvtransport.transfer import Transfer
from kvtransport.waiting import Pause, check_duration

log = logging.getLogger("kvtransport.agent")


def _check_identity(name: object, fingerprint: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 200:
        raise ConfigError(f"an agent's name must have 1 to 200 characters, got {name!r}")
    if not isinstance(fingerprint, bytes) or len(fingerprint) > 4096:
        raise ConfigError(f"fingerprint must be at most 4096 bytes, got {fingerprint!r:.80}")


class Agent:
    """Moves bytes between this process and its peers over one backend.

    ``Agent(backend=...)`` takes a backend instance; ``Agent.open`` finds one by
    name.  Both open the device and raise ``BackendUnavailableError`` when they
    cannot; nothing stays open then.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        config: Any = None,
        fingerprint: bytes = b"",
        options: AgentOptions | Mapping[str, Any] | None = None,
    ) -> None:
        _check_identity(name, fingerprint)
        self.name = name
        self.options = (
            options
            if isinstance(options, AgentOptions)
            else resolve(AgentOptions, "agent", argument=options).config
        )
        self.fingerprint = fingerprint
        self.incarnation = token_bytes(INCARNATION_BYTES)
        self._config = backend_config(backend.info, config)
        self._backend = backend
        self._wire = backend.info.wire
        self.capabilities: Capabilities = backend.capabilities(self._config)
        self._lock = threading.RLock()
        self._gate = Gate(name, one_thread=self.capabilities.threading == "single")
        self._counters = Counters()
        self._events = EventQueue(self.options.max_events, self.options.max_notifications)
        self._regions = RegionTable(backend, self.capabilities, self._release_region)
        self._peers = PeerTable(
            backend,
            wire=self._wire,
            fingerprint=fingerprint,
            incarnation=self.incarnation,
        )
        self._inflight = InFlight(
            backend, self.capabilities, self.options.drain_s, self._on_finished
        )
        self._progress = Progress(
            backend, self._inflight, self._peers, self._events, self._counters
        )
        self._posting = Posting(
            gate=self._gate,
            lock=self._lock,
            capabilities=self.capabilities,
            options=self.options,
            peers=self._peers,
            inflight=self._inflight,
            progress=self._progress,
            on_finished=self._on_finished,
        )
        self._open_backend()
        self._gate.state = "open"

    @classmethod
    def open(
        cls,
        backend: str,
        *,
        name: str,
        config: Any = None,
        fingerprint: bytes = b"",
        options: AgentOptions | Mapping[str, Any] | None = None,
    ) -> Agent:
        """Open the installed backend called ``backend``.

        ``config`` is its configuration object or a mapping; a mapping is
        completed from the environment and the configuration file.  Raises
        ``ConfigError`` or ``BackendUnavailableError``.
        """
        loaded = registry.load(backend)
        return cls(
            edge.call(loaded), name=name, config=config, fingerprint=fingerprint, options=options
        )

    def _open_backend(self) -> None:
        # Asked of the instance: a layer answers for the backend that it wraps.
        info = self._backend.info
        probe = edge.call(self._backend.probe, self._config)
        if not probe.available:
            raise BackendUnavailableError(
                f"backend {info.name!r} cannot run here: {probe.reason}",
                hint=probe.hint or info.install_hint,
                backend=info.name,
            )
        # Transport libraries key their state by agent name; the incarnation keeps a
        # restarted agent, or a second one in this process, apart from the first.
        edge.call(self._backend.open, f"{self.name}.{self.incarnation.hex()[:8]}", self._config)

    def register(
        self,
        buffer: Any,
        *,
        name: str | None = None,
        kind: str = "host",
        device: int = 0,
        access: str = "rw",
    ) -> Region:
        """Make ``buffer`` reachable by peers, and usable in local transfers.

        ``buffer`` is anything with the buffer protocol, a tensor-like object
        with ``data_ptr()`` and ``nbytes``, or ``(address, nbytes, owner)``.  It
        is kept alive until the region is deregistered.  ``access`` ("r", "w",
        "rw" or "") is what peers may do.  Raises ``RegistrationError``,
        ``RegistrationLimitError`` or ``UnsupportedError``; nothing stays
        registered then.
        """
        self._gate.check()
        with self._lock:
            self._gate.check()
            return self._regions.register(
                buffer, name=name, kind=kind, device=device, access=access
            )

    def register_many(
        self,
        buffers: Mapping[str, Any],
        *,
        kind: str = "host",
        device: int = 0,
        access: str = "rw",
    ) -> dict[str, Region]:
        """Register all of ``buffers`` by name, or none of them when one fails."""
        done: dict[str, Region] = {}
        with self._lock:
            try:
                for name, buffer in buffers.items():
                    done[name] = self.register(
                        buffer, name=name, kind=kind, device=device, access=access
                    )
            except KVTransportError:
                for region in done.values():
                    self._regions.deregister(region)
                raise
        return done

    def deregister(self, region: Region, drain_s: float = 0.0) -> None:
        """Withdraw ``region`` and let go of its buffer.

        Waits up to ``drain_s`` for transfers that use it.  Raises
        ``RegionBusyError`` when some still do, or when part of it is quarantined
        (that never ends), and ``StaleDescriptorError`` when it is not registered.
        """
        self._gate.check()
        until = monotonic() + check_duration(drain_s, "drain_s")
        pause = Pause()
        while True:
            with self._lock:
                self._gate.check()
                self._regions.check_known(region)
                if region.users and not region.quarantined_bytes:
                    self._progress.step()
                if not region.busy or region.quarantined_bytes or monotonic() >= until:
                    self._regions.deregister(region)
                    return
            pause()

    def _release_region(self, region: Region) -> None:
        # Leaving a ``with`` block; after close there is nothing left to release.
        if self._gate.state == "open":
            self.deregister(region, drain_s=self.options.drain_s)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Every registered region."""
        return tuple(self._regions)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of local memory that are kept for ever; see ``TransferState``."""
        return sum(region.quarantined_bytes for region in self._regions)

    def metadata(self) -> bytes:
        """Return what a peer needs to reach the regions registered now."""
        self._gate.check()
        with self._lock:
            self._gate.check()
            exported = edge.call(self._backend.export)
            self._regions.frozen = not self.capabilities.dynamic_regions
            header = Header(
                self.name, self.incarnation, self._regions.epoch, self._wire, self.fingerprint
            )
            return encode(header, Body(self.capabilities, self._regions.entries(), exported))

    def add_peer(self, blob: bytes) -> Peer:
        """Import a peer's metadata; the same bytes give the same peer.

        Newer metadata of a known incarnation updates the peer in place; a new
        incarnation gives a new peer and retires the old one, which is dropped
        when its transfers have ended.  A lost peer is imported anew.  Raises
        ``MalformedMetadataError``, ``IncompatiblePeerError`` (naming the field
        and both values), ``StaleDescriptorError`` for a retired incarnation or
        ``PeerLostError``; the former state stays then.
        """
        self._gate.check()
        with self._lock:
            self._gate.check()
            peer = self._peers.add(blob)
            self._peers.reap()
            return peer

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Every peer that is not dropped yet."""
        self._gate.check_fork()
        with self._lock:
            return tuple(self._peers)

    def remove_peer(self, peer: Peer, drain_s: float | None = None) -> None:
        """End a peer's transfers, wait until they are quiet, then forget it.

        Raises ``UndrainedError`` when some did not become quiet within
        ``drain_s``; their memory is quarantined and the peer stays mapped.  A
        peer that is gone already is left alone.
        """
        self._gate.check()
        until = monotonic() + check_duration(
            self.options.drain_s if drain_s is None else drain_s, "drain_s"
        )
        with self._lock:
            self._gate.check()
            if peer.dropped:
                return
            self._peers.check_known(peer)
            self._peers.leave(peer, PeerState.REMOVED)
            for transfer in self._inflight.of_peer(peer):
                gone = TransferFailedError(f"peer {peer.name!r} was removed")
                self._inflight.drain(transfer, gone)
        self._drain_until(until, peer)
        with self._lock:
            self._peers.reap()
        if peer.quarantined:
            raise UndrainedError(
                f"transfers of peer {peer.name!r} did not become quiet; their memory is kept",
                peer=peer.name,
            )

    def read(
        self,
        peer: Peer,
        pairs: Iterable[AnyPair],
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> Transfer:
        """Post a one-sided read from ``peer``; its data lies in local memory when DONE.

        ``pairs`` name local and remote bytes (see ``Pair``); layers that share
        index vector *objects* are merged once.  ``notify`` is delivered to the
        peer after success.  Raises ``DescriptorError``, ``UnsupportedError``,
        ``PeerLostError``, ``StaleDescriptorError`` or ``BackpressureError``
        (retryable); nothing was posted then.
        """
        return self.post(self.prepare(Op.READ, peer, pairs), deadline_s=deadline_s, notify=notify)

    def write(
        self,
        peer: Peer,
        pairs: Iterable[AnyPair],
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> Transfer:
        """Post a one-sided write to ``peer``; as ``read``, the other way round.

        At DONE the local memory may be reused, and the peer sees the bytes when
        ``capabilities.completion`` is ``"remote_visible"``.
        """
        return self.post(self.prepare(Op.WRITE, peer, pairs), deadline_s=deadline_s, notify=notify)

    def notify(self, peer: Peer, payload: bytes, *, deadline_s: float | None = None) -> Transfer:
        """Send a message that belongs to no data."""
        op = Op.WRITE if self.capabilities.can_write else Op.READ
        return self.post(Plan(op, peer), deadline_s=deadline_s, notify=payload)

    def prepare(self, op: Op, peer: Peer, pairs: Iterable[AnyPair]) -> Plan:
        """Check and merge once what is to be posted many times with ``post``."""
        self._gate.check()
        return make_plan(op, peer, pairs, self._regions.by_id, self.capabilities)

    def post(
        self, plan: Plan, *, deadline_s: float | None = None, notify: bytes | None = None
    ) -> Transfer:
        """Post a plan; raises ``StaleDescriptorError`` if what it names has changed."""
        self._gate.check()
        return self._posting.post(plan, deadline_s, notify)

    def progress(self) -> None:
        """Let the backend work; never blocks and keeps all events for later."""
        self._gate.check()
        with self._lock:
            self._gate.check()
            self._progress.step()

    def poll(self) -> list[Event]:
        """Progress, then return ended transfers and lost peers since the last call."""
        self._gate.check()
        with self._lock:
            if self._gate.state != "open":
                self._gate.check()
            self._progress.step()
            return self._events.take()

    def notifications(self) -> list[NotificationEvent]:
        """Progress, then return the messages that arrived since the last call."""
        self._gate.check()
        with self._lock:
            if self._gate.state != "open":
                self._gate.check()
            self._progress.step()
            return self._events.take_notifications()

    def _on_finished(self, transfer: Transfer) -> None:
        self._counters.finished(transfer)
        self._events.put(TransferEvent(transfer))

    def stats(self) -> AgentStats:
        """Return a snapshot of what was counted."""
        self._gate.check_fork()
        with self._lock:
            return AgentStats(
                transfers=dict(self._counters.transfers),
                bytes_moved=dict(self._counters.bytes_moved),
                descriptors=dict(self._counters.descriptors),
                in_flight=len(self._inflight),
                quarantined_bytes=self.quarantined_bytes,
                contract_errors=self._counters.contract_errors + self._inflight.contract_errors,
                late_completions=self._inflight.late_completions,
                events_dropped=self._events.dropped_events,
                notifications_dropped=self._events.dropped_notifications,
                peers_lost=self._counters.peers_lost,
            )

    def close(self, drain_s: float = 5.0) -> None:
        """End every transfer, give up regions and peers, close the backend.

        Idempotent.  Raises ``UndrainedError`` after closing when some transfer
        did not become quiet within ``drain_s``: its memory is then kept until
        the process ends.
        """
        self._gate.check_process()
        until = monotonic() + check_duration(drain_s, "drain_s")
        with self._lock:
            if self._gate.state != "open":
                return
            self._gate.state = "closing"
            for transfer in self._inflight.of_peer(None):
                self._inflight.drain(transfer, ClosedError(f"agent {self.name!r} closes"))
        try:
            self._drain_until(until, None)
        finally:
            with self._lock:
                self._shut()
        if kept := self.quarantined_bytes:
            raise UndrainedError(
                f"agent {self.name!r} closed, but {kept} bytes did not become quiet and are "
                "kept until the process ends"
            )

    def _drain_until(self, until: float, peer: Peer | None) -> None:
        drain_until(
            until, lock=self._lock, progress=self._progress, inflight=self._inflight, peer=peer
        )

    def _shut(self) -> None:
        release_all(self._inflight, self._regions, self._peers)
        self._gate.state = "closed"
        edge.call(self._backend.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        gate: Gate | None = getattr(self, "_gate", None)
        if gate is None or gate.state == "closed" or gate.forked or sys.is_finalizing():
            return
        message = f"agent {self.name!r} was never closed"
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        if len(self._inflight):
            # Not quiet, and nobody is left to wait: the backend must outlive us.
            lifetime.keep_for_ever(self._backend, *self._regions)
        else:
            self._shut()

    def __repr__(self) -> str:
        return f"<Agent {self.name!r} {self._backend.info.name} {self._gate.state}>"
