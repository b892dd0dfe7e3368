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
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from secrets import token_bytes
from time import monotonic
from typing import Any

from kvtransport import edge, lifetime, registry
from kvtransport.backend import Backend, Completion, Notification, Op, PeerDown
from kvtransport.capabilities import Capabilities
from kvtransport.config import backend_config, decode
from kvtransport.errors import (
    BackendContractError,
    BackendUnavailableError,
    ClosedError,
    ConfigError,
    ForkError,
    KVTransportError,
    PeerLostError,
    RegionBusyError,
    StaleDescriptorError,
    TransferFailedError,
    UndrainedError,
    UnsupportedError,
)
from kvtransport.events import Event, EventQueue, NotificationEvent, PeerLostEvent, TransferEvent
from kvtransport.inflight import InFlight
from kvtransport.layout.blocks import AnyPair
from kvtransport.metadata import INCARNATION_BYTES, Body, Header, encode
from kvtransport.peer import Peer, PeerState
from kvtransport.peers import PeerTable
from kvtransport.plan import EMPTY, Plan, Planner
from kvtransport.region import Region
from kvtransport.regions import RegionTable
from kvtransport.stats import AgentStats, Counters
from kvtransport.transfer import Transfer, TransferState
from kvtransport.waiting import Pause, check_duration

log = logging.getLogger("kvtransport.agent")


def _check_identity(name: object, fingerprint: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 200:
        raise ConfigError(f"an agent's name must have 1 to 200 characters, got {name!r}")
    if not isinstance(fingerprint, bytes) or len(fingerprint) > 4096:
        raise ConfigError(f"fingerprint must be at most 4096 bytes, got {fingerprint!r:.80}")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Limits of an agent; durations are seconds.

    ``deadline_s`` is a transfer's deadline unless the call gives one, ``drain_s``
    the time that a late, cancelled or failed transfer gets to become quiet
    before its memory is quarantined.  ``max_events`` and ``max_notifications``
    bound what nobody has read yet.
    """

    deadline_s: float = 30.0
    drain_s: float = 10.0
    max_events: int = 16_384
    max_notifications: int = 1 << 20

    def __post_init__(self) -> None:
        check_duration(self.deadline_s, "deadline_s")
        check_duration(self.drain_s, "drain_s")
        for name in ("max_events", "max_notifications"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


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
        self._state = "closed"
        _check_identity(name, fingerprint)
        self.name = name
        self.options = (
            options
            if isinstance(options, AgentOptions)
            else decode(AgentOptions, options or {}, where="agent options")
        )
        self.fingerprint = fingerprint
        self.incarnation = token_bytes(INCARNATION_BYTES)
        self._config = backend_config(backend.info, config)
        self._backend = backend
        self._wire = backend.info.wire
        self.capabilities: Capabilities = backend.capabilities(self._config)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._only_thread = (
            threading.get_ident() if self.capabilities.threading == "single" else None
        )
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
        self._transfer_ids = count(1)
        self._open_backend()
        self._state = "open"

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

    # -- checks -------------------------------------------------------------

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkError(
                f"agent {self.name!r} was opened in process {self._pid}; open one after fork"
            )
        if self._state != "open":
            raise ClosedError(f"agent {self.name!r} is {self._state}")
        if self._only_thread is not None and self._only_thread != threading.get_ident():
            raise UnsupportedError(
                "this backend must be used from the thread that opened it", capability="threading"
            )

    # -- memory -------------------------------------------------------------

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
        self._check()
        with self._lock:
            self._check()
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
        self._check()
        until = monotonic() + check_duration(drain_s, "drain_s")
        pause = Pause()
        while True:
            with self._lock:
                self._check()
                self._regions.check_known(region)
                if region.users and not region.quarantined_bytes:
                    self._progress()
                try:
                    self._regions.deregister(region)
                    return
                except RegionBusyError:
                    if region.quarantined_bytes or monotonic() >= until:
                        raise
            pause()

    def _release_region(self, region: Region) -> None:
        # Leaving a ``with`` block; after close there is nothing left to release.
        if self._state == "open":
            self.deregister(region, drain_s=self.options.drain_s)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of local memory that are kept for ever; see ``TransferState``."""
        return sum(region.quarantined_bytes for region in self._regions)

    # -- peers --------------------------------------------------------------

    def metadata(self) -> bytes:
        """Return what a peer needs to reach the regions registered now."""
        self._check()
        with self._lock:
            self._check()
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
        self._check()
        with self._lock:
            self._check()
            peer = self._peers.add(blob)
            self._peers.reap()
            return peer

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Every peer that is not dropped yet."""
        with self._lock:
            return tuple(self._peers)

    def remove_peer(self, peer: Peer, drain_s: float | None = None) -> None:
        """End a peer's transfers, wait until they are quiet, then forget it.

        Raises ``UndrainedError`` when some did not become quiet within
        ``drain_s``; their memory is quarantined and the peer stays mapped.
        """
        self._check()
        until = monotonic() + check_duration(
            self.options.drain_s if drain_s is None else drain_s, "drain_s"
        )
        with self._lock:
            self._check()
            self._peers.leave(peer, PeerState.REMOVED)
            for transfer in self._inflight.transfers:
                if transfer.peer is peer:
                    self._inflight.drain(
                        transfer, TransferFailedError(f"peer {peer.name!r} was removed")
                    )
        self._drain_until(until, peer)
        with self._lock:
            self._peers.reap()
        if peer.quarantined:
            raise UndrainedError(
                f"transfers of peer {peer.name!r} did not become quiet; their memory is kept",
                peer=peer.name,
            )

    # -- transfers ----------------------------------------------------------

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
        return self.post(Plan(op, peer, (), (), (), 0, 0), deadline_s=deadline_s, notify=payload)

    def prepare(self, op: Op, peer: Peer, pairs: Iterable[AnyPair]) -> Plan:
        """Check and merge once what is to be posted many times with ``post``."""
        self._check()
        return Planner(op, peer, self._regions.by_id, self.capabilities).plan(pairs)

    def post(
        self, plan: Plan, *, deadline_s: float | None = None, notify: bytes | None = None
    ) -> Transfer:
        """Post a plan; raises ``StaleDescriptorError`` if what it names has changed."""
        self._check()
        if notify is not None:
            self._check_notify(notify)
        now = monotonic()
        if deadline_s is None:
            deadline_s = self.options.deadline_s
        else:
            check_duration(deadline_s, "deadline_s")
        parts = plan.parts or ((EMPTY,) if notify is not None else ())
        with self._lock:
            self._check()
            if self._peers.by_id.get(plan.peer.peer_id) is not plan.peer:
                self._refuse_unknown(plan.peer)
            plan.check_current()
            transfer = Transfer(
                self,
                transfer_id=next(self._transfer_ids),
                op=plan.op,
                peer=plan.peer,
                regions=plan.regions,
                parts=parts,
                nbytes=plan.nbytes,
                descriptors=plan.descriptors,
                notify=notify,
                started_s=now,
                deadline=now + deadline_s,
            )
            if parts:
                self._inflight.submit(transfer)
            else:
                transfer.state = TransferState.DONE
                transfer.finished_s = now
                self._on_finished(transfer)
            return transfer

    def _refuse_unknown(self, peer: Peer) -> None:
        peer.check_usable()
        raise StaleDescriptorError(f"peer {peer.name!r} was not added to this agent")

    def _check_notify(self, payload: object) -> None:
        if self.capabilities.notify == "none":
            raise UnsupportedError("this backend has no notifications", capability="notify")
        if not isinstance(payload, bytes):
            raise ConfigError(f"notify must be bytes, got {type(payload).__name__}")
        if len(payload) > self.capabilities.max_notify_bytes:
            raise UnsupportedError(
                f"notification has {len(payload)} bytes and the backend's limit is "
                f"{self.capabilities.max_notify_bytes}",
                capability="max_notify_bytes",
            )

    def wait_for(self, transfer: Transfer, timeout_s: float | None) -> None:
        """Implements ``Transfer.wait``."""
        until = None
        if timeout_s is not None:
            until = monotonic() + check_duration(timeout_s, "timeout_s")
        pause: Pause | None = None
        while not self._step(transfer):
            if until is not None and monotonic() >= until:
                self._give_up(transfer)
                break
            pause = pause or Pause()
            pause()
        if transfer.state is not TransferState.DONE:
            raise transfer.error or TransferFailedError("the transfer failed")

    def _step(self, transfer: Transfer) -> bool:
        """Progress once; whether the transfer is terminal."""
        with self._lock:
            if not transfer.done:
                self._check_progress()
                self._progress()
            return transfer.done

    def _give_up(self, transfer: Transfer) -> None:
        """Begin to drain a transfer that was waited for in vain; raises unless it ended."""
        with self._lock:
            late = self._inflight.timeout_error(transfer, monotonic())
            self._inflight.drain(transfer, late)
            if not transfer.done:
                raise late

    def cancel_transfer(self, transfer: Transfer) -> None:
        """Implements ``Transfer.cancel``."""
        with self._lock:
            if not transfer.done:
                self._check()
                self._inflight.cancel(transfer)

    # -- events -------------------------------------------------------------

    def progress(self) -> None:
        """Let the backend work; never blocks and keeps all events for later."""
        self._check()
        with self._lock:
            self._check()
            self._progress()

    def poll(self) -> list[Event]:
        """Progress, then return ended transfers and lost peers since the last call."""
        self._check()
        with self._lock:
            self._check()
            self._progress()
            return self._events.take()

    def notifications(self) -> list[NotificationEvent]:
        """Progress, then return the messages that arrived since the last call."""
        self._check()
        with self._lock:
            self._check()
            self._progress()
            return self._events.take_notifications()

    def _check_progress(self) -> None:
        # Draining goes on while the agent closes; only then is "closing" fine.
        if self._state != "closing":
            self._check()

    def _progress(self) -> None:
        for event in edge.call(self._backend.poll):
            if type(event) is Completion:
                self._inflight.complete(event)
            else:
                self._dispatch(event)
        self._inflight.sweep(monotonic())
        self._inflight.pump()
        if self._peers.leaving:
            self._peers.reap()

    def _dispatch(self, event: object) -> None:
        if isinstance(event, Notification):
            self._deliver(event)
        elif isinstance(event, PeerDown):
            peer = self._peers.by_id.get(event.peer_id)
            if peer is not None:
                self._lose(peer, event.error)
            elif not self._peers.was_known(event.peer_id):
                self._breach(f"backend reported unknown peer {event.peer_id} as down")
        else:
            self._breach(f"backend reported {event!r:.200}, which is no event")

    def _deliver(self, event: Notification) -> None:
        peer = self._peers.by_id.get(event.peer_id)
        if peer is None:
            if not self._peers.was_known(event.peer_id):
                self._breach(f"backend attributed a notification to unknown peer {event.peer_id}")
        elif not self._events.put_notification(NotificationEvent(peer, event.payload)):
            log.error("notification of peer %s dropped: nobody reads them", peer.name)

    def _lose(self, peer: Peer, error: KVTransportError) -> None:
        if peer.state in (PeerState.LOST, PeerState.REMOVED):
            return
        log.warning("peer %s is lost: %s", peer.name, error)
        self._counters.peers_lost += 1
        self._peers.leave(peer, PeerState.LOST, error)
        for transfer in self._inflight.transfers:
            if transfer.peer is peer:
                self._inflight.drain(
                    transfer, PeerLostError(f"peer {peer.name!r} is lost: {error}", native=error)
                )
        self._events.put(PeerLostEvent(peer, error))

    def _breach(self, message: str) -> None:
        self._counters.contract_errors += 1
        log.error("backend broke its contract: %s", BackendContractError(message))

    def _on_finished(self, transfer: Transfer) -> None:
        self._counters.finished(transfer)
        self._events.put(TransferEvent(transfer))

    def stats(self) -> AgentStats:
        """Return a snapshot of what was counted."""
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

    # -- end ----------------------------------------------------------------

    def close(self, drain_s: float = 5.0) -> None:
        """End every transfer, give up regions and peers, close the backend.

        Idempotent.  Raises ``UndrainedError`` after closing when some transfer
        did not become quiet within ``drain_s``: its memory is then kept until
        the process ends.
        """
        if self._pid != os.getpid():
            raise ForkError(f"agent {self.name!r} was opened in process {self._pid}")
        until = monotonic() + check_duration(drain_s, "drain_s")
        with self._lock:
            if self._state != "open":
                return
            self._state = "closing"
            for transfer in self._inflight.transfers:
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
        """Wait for the transfers of one or all peers; quarantine what stays."""
        pause = Pause()
        while True:
            with self._lock:
                if not self._remaining(peer):
                    return
                self._progress()
                remaining = self._remaining(peer)
                if monotonic() >= until:
                    for transfer in remaining:
                        self._inflight.quarantine(transfer)
                    return
            pause()

    def _remaining(self, peer: Peer | None) -> list[Transfer]:
        return [t for t in self._inflight.transfers if peer is None or t.peer is peer]

    def _shut(self) -> None:
        for transfer in self._inflight.transfers:
            self._inflight.quarantine(transfer)
        for region in self._regions:
            if region.quarantined_bytes:
                lifetime.keep_for_ever(region)
                continue
            try:
                self._regions.deregister(region)
            except KVTransportError as error:
                log.warning("deregistering %s at close failed: %s", region.name, error)
                lifetime.keep_for_ever(region)
        for peer in self._peers:
            self._peers.leave(peer, PeerState.REMOVED)
        self._peers.reap()
        self._state = "closed"
        edge.call(self._backend.close)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") == "closed" or sys.is_finalizing():
            return
        if self._pid != os.getpid():
            return
        warnings.warn(f"agent {self.name!r} was never closed", ResourceWarning, source=self)
        if len(self._inflight):
            # Not quiet, and nobody is left to wait: the backend must outlive us.
            lifetime.keep_for_ever(self._backend, *self._regions)
        else:
            self._shut()

    def __repr__(self) -> str:
        return f"<Agent {self.name!r} {self._backend.info.name} {self._state}>"
