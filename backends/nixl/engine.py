"""The ``Backend`` contract over one NIXL agent."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvtransport.backend import Backend, Blocks, Completion, Event, Op, PeerDown, RegionSpec
from kvtransport.errors import (
    BackendUnavailableError,
    BackpressureError,
    ClosedError,
    DescriptorError,
    ForkError,
    KVTransportError,
    PeerLostError,
    UnsupportedError,
)
from kvtransport_backends.nixl.body import decode
from kvtransport_backends.nixl.config import NixlConfig
from kvtransport_backends.nixl.connect import Connector, Immediate
from kvtransport_backends.nixl.driver import Driver, NativeAgent, load_driver
from kvtransport_backends.nixl.exit import AtExit
from kvtransport_backends.nixl.flight import Flight
from kvtransport_backends.nixl.inbox import Inbox
from kvtransport_backends.nixl.liveness import Liveness
from kvtransport_backends.nixl.local import SCRATCH_BLOCK, LocalRegions
from kvtransport_backends.nixl.native import is_lost, is_native, translate
from kvtransport_backends.nixl.parts import Part, cut
from kvtransport_backends.nixl.peers import Peer, Peers
from kvtransport_backends.nixl.process import make_immortal, patched_environment, thread_ids
from kvtransport_backends.nixl.requests import Requests

_log = logging.getLogger("kvtransport.nixl")


class NixlBackend(Backend):
    """One NIXL agent with one plugin.  Subclasses name the plugin and its checks."""

    plugin: ClassVar[str]

    def __init__(self) -> None:
        self._agent: NativeAgent | None = None
        self._flights: dict[int, Flight] = {}
        self._events: list[Event] = []
        self._peers_lost = 0
        self._stuck = 0
        self._pid = os.getpid()
        self._exit = AtExit(self)

    # -- what a subclass decides ------------------------------------------

    @classmethod
    @abstractmethod
    def kinds(cls, config: Any) -> frozenset[str]:
        """Memory kinds that can be registered under ``config``."""

    @abstractmethod
    def check(self, config: Any) -> None:
        """Check the environment; raises ``BackendUnavailableError`` naming the fix."""

    def plugin_params(self, config: Any) -> dict[str, str]:  # noqa: ARG002
        """NIXL's own parameters for the plugin."""
        return {}

    def environment(self, config: Any) -> Mapping[str, str]:  # noqa: ARG002
        """Variables that must be set while the plugin starts."""
        return {}

    def verify(self, segments: list[str], config: Any) -> None:
        """Check the NIXL memory types that the started plugin offers."""

    def connector(self, agent: NativeAgent, handle: int, config: Any) -> Connector:  # noqa: ARG002
        """How connections to peers are made."""
        return Immediate()

    def liveness(self, config: Any) -> Liveness | None:  # noqa: ARG002
        """What notices that peers end, where NIXL's plugin does not."""
        return None

    def may_destroy(self, *, at_exit: bool) -> bool:  # noqa: ARG002
        """Whether NIXL's agent can be destroyed now without blocking for ever."""
        return True

    # -- opening and closing ----------------------------------------------

    def open(self, name: str, config: NixlConfig) -> None:
        self.check(config)
        driver = load_driver(config.module, self.info.install_hint)
        # A suffix of its own makes a restarted agent a new one to NIXL too.
        native_name = f"{name}#{os.urandom(6).hex()}"
        before = thread_ids()
        try:
            agent = driver.new_agent(
                native_name,
                progress_thread=config.progress == "thread",
                progress_delay_us=config.progress_interval_us,
            )
            self._require_plugin(agent, config)
            with patched_environment(self.environment(config)):
                handle = agent.createBackend(self.plugin, self.plugin_params(config))
            self.verify(agent.getBackendParams(handle)[1], config)
        except Exception as error:
            if not is_native(error):
                raise
            raise BackendUnavailableError(
                f"NIXL's {self.plugin} did not start: {error}",
                hint="NIXL_LOG_LEVEL=INFO shows why on stderr",
                backend=self.info.name,
            ) from error
        self._threads = thread_ids() - before
        self._start(driver, agent, handle, native_name, config)

    def _require_plugin(self, agent: NativeAgent, config: NixlConfig) -> None:
        plugins = agent.getAvailPlugins()
        if self.plugin not in plugins:
            raise BackendUnavailableError(
                f"{config.module} has no plugin {self.plugin}, only {', '.join(plugins)}",
                hint=self.info.install_hint,
                backend=self.info.name,
            )

    def _start(
        self, driver: Driver, agent: NativeAgent, handle: int, name: str, config: NixlConfig
    ) -> None:
        backend = self.info.name
        self._config = config
        self._name = name
        self._in_progress = driver.bindings.NIXL_IN_PROG
        self._plugin_handles = [handle]
        self._local = LocalRegions(driver, agent, handle, backend)
        self._connector = self.connector(agent, handle, config)
        self._peers = Peers(driver, agent, handle, backend, self._connector)
        self._requests = Requests(driver, agent, handle, self._local)
        self._inbox = Inbox()
        self._liveness = self.liveness(config)
        self._agent = agent
        self._exit.arm()

    def close(self) -> None:
        self._close(at_exit=False)

    def close_at_exit(self) -> None:
        """Close while the interpreter ends; NIXL's agent may outlive it."""
        self._close(at_exit=True)

    def _close(self, *, at_exit: bool) -> None:
        if self._agent is None:
            return
        self._exit.disarm()
        if self._liveness is not None:
            self._liveness.close()
        destroy = self.may_destroy(at_exit=at_exit)
        agent, self._agent = self._agent, None
        if destroy:
            with contextlib.suppress(Exception):  # closing goes on and never raises
                self._local.tables.clear()
                self._peers.clear_tables()
        else:
            make_immortal(agent)
        # Handles still in flight are not released: NIXL reports that as done
        # while their data keeps landing.  They end with the agent.
        self._flights.clear()
        del self._local, self._peers, self._requests, self._connector, agent

    def _opened(self) -> NativeAgent:
        agent = self._agent
        if agent is None:
            raise ClosedError("the backend is not open", backend=self.info.name)
        if os.getpid() != self._pid:
            raise ForkError(
                "NIXL does not survive fork: open the backend in the process that uses it",
                backend=self.info.name,
            )
        return agent

    # -- memory -----------------------------------------------------------

    def register(self, region: RegionSpec) -> None:
        self._opened()
        kinds = self.kinds(self._config)
        if region.kind not in kinds:
            raise UnsupportedError(
                f"kind: {self.info.name} registers {', '.join(sorted(kinds))} memory here,"
                f" not {region.kind!r}",
                capability="memory",
                backend=self.info.name,
            )
        self._local.add(region)

    def deregister(self, region_id: int) -> None:
        self._opened()
        self._local.remove(region_id)

    def export(self) -> bytes:
        self._opened()
        contact = self._liveness.contact if self._liveness is not None else ""
        return self._local.export(self.plugin, self._name, contact)

    # -- peers ------------------------------------------------------------

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self._opened()
        decoded = decode(body, plugin=self.plugin, backend=self.info.name)
        if self._liveness is not None:
            self._sweep()
            self._liveness.watch(decoded.agent, decoded.contact)
        self._await_end(decoded.agent)
        self._peers.load(peer_id, decoded)

    def _await_end(self, name: str) -> None:
        """Wait for what is left of a failed connection before making a new one."""
        agent, peer = self._opened(), self._peers.named(name)
        until = time.monotonic() + 4 * self._config.settle_ms / 1000
        while peer is not None and peer.forgotten and peer.in_flight and time.monotonic() < until:
            self._receive(agent)
            for flight in list(self._flights.values()):
                if flight.peer is peer:
                    self._advance(agent, flight)
            time.sleep(0.001)

    def drop_peer(self, peer_id: int) -> None:
        self._opened()
        self._peers.drop(peer_id)

    # -- transfers --------------------------------------------------------

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        agent = self._opened()
        if len(self._flights) >= self._config.max_in_flight:
            raise BackpressureError(
                f"max_in_flight: {self._config.max_in_flight} transfers are in flight",
                backend=self.info.name,
            )
        if self._liveness is not None:
            self._sweep()
        peer = self._peers.usable(peer_id)
        if not len(blocks):
            op, blocks = Op.READ, SCRATCH_BLOCK  # a notification without data
        parts = cut(blocks, self._local.book, peer.book, self._config.part_bytes)
        payload = b"" if notify is None else self._inbox.wrap(notify)
        flight = Flight(ticket, op, peer, deque(parts), payload)
        self._post_parts(agent, flight)
        if flight.error is not None and not flight.posted:
            raise flight.error
        if flight.handles or flight.parts or flight.error is not None:
            peer.in_flight += 1
            self._flights[ticket] = flight
        else:
            self._events.append(Completion(ticket))

    def cancel(self, ticket: int) -> None:  # noqa: ARG002
        raise UnsupportedError(
            "cancel: NIXL reports a transfer as released while its data still lands",
            capability="cancel",
            backend=self.info.name,
        )

    def poll(self) -> Sequence[Event]:
        agent = self._opened()
        if self._liveness is not None:
            self._sweep()
        if self._flights:
            for flight in list(self._flights.values()):
                self._advance(agent, flight)
        self._receive(agent)
        events, self._events = self._events, []
        if self._flights and not events:
            # Whoever has the work to do, NIXL's thread or a peer on this
            # machine, may need this core: without the yield a poll loop slows
            # a transfer down a hundredfold.  (time.sleep(0) costs 50 us.)
            os.sched_yield()
        return events

    def _receive(self, agent: NativeAgent) -> None:
        """Let NIXL progress and take what it received."""
        messages = agent.getNotifs({}, self._plugin_handles)
        if messages or self._inbox.waiting:
            self._events.extend(self._inbox.receive(messages, self._peers.id_of))

    def counters(self) -> Mapping[str, int]:
        return {
            "peers_lost": self._peers_lost,
            "transfers_stuck": self._stuck,
            "notifications_dropped": self._inbox.dropped,
        }

    # -- peers that end ---------------------------------------------------

    def _sweep(self) -> None:
        """Learn from the lifelines which peers have ended."""
        assert self._liveness is not None
        for name, polite in self._liveness.ended():
            peer = self._peers.named(name)
            if peer is None or peer.lost is not None:
                continue
            if polite and not peer.in_flight:
                # It closed in good order: worth an error on the next use only.
                peer.lost = PeerLostError("the peer has closed", backend=self.info.name)
                peer.tables.clear()
            else:
                ended = PeerLostError("the peer's process has ended", backend=self.info.name)
                self._lose(peer, ended)

    def _lose(self, peer: Peer, error: KVTransportError) -> None:
        """The peer takes no transfers any more; those in flight end with ``error``."""
        if peer.lost is not None:
            return
        peer.lost = error
        peer.tables.clear()
        self._peers_lost += 1
        self._events.extend(PeerDown(peer_id, error) for peer_id in peer.ids)
        # UCX ends the requests of a failed endpoint in later progress calls,
        # and once NIXL has forgotten the peer it answers nothing about them.
        for flight in self._flights.values():
            if flight.peer is peer and not flight.stuck:
                flight.error = error
                self._settle(flight)

    # -- one flight -------------------------------------------------------

    def _advance(self, agent: NativeAgent, flight: Flight) -> None:
        if flight.stuck:
            return
        if not flight.peer.forgotten:
            self._reap(agent, flight)
            if flight.parts and flight.error is None:
                self._post_parts(agent, flight)
        if flight.settle_until is not None and time.monotonic() < flight.settle_until:
            return
        if flight.peer.forgotten and flight.handles:
            # They hold the failed endpoint open.  Closing it, too, takes time,
            # and a new connection to the peer would get in its way.
            self._release(agent, flight)
            self._peers.disconnect(flight.peer)
            self._settle(flight)
        elif not flight.handles and (flight.error is not None or not flight.parts):
            self._finish(flight)

    def _reap(self, agent: NativeAgent, flight: Flight) -> None:
        """Release the handles that have ended."""
        for handle in list(flight.handles):
            try:
                if agent.getXferStatus(handle) == self._in_progress:
                    continue
            except Exception as error:
                if not is_native(error):
                    raise
                self._failed(flight, error)
                if flight.peer.forgotten:
                    return
            flight.handles.remove(handle)
            agent.releaseXferReq(handle)

    def _post_parts(self, agent: NativeAgent, flight: Flight) -> None:
        """Give parts to NIXL until none is left, one fails or the time is up."""
        deadline = time.monotonic() + self._config.post_budget_ms / 1000
        while flight.parts and flight.error is None:
            last = len(flight.parts) == 1
            if last and flight.notify and flight.handles:
                return  # the notification must not overtake the other parts
            handle = self._make(flight, flight.notify if last else b"")
            if handle is None:
                return
            part = flight.parts.popleft()
            self._post(agent, flight, handle, part)
            if flight.parts and time.monotonic() > deadline:
                return

    def _make(self, flight: Flight, notify: bytes) -> int | None:
        try:
            return self._requests.make(flight.peer, flight.op, flight.parts[0], notify)
        except KVTransportError as error:
            flight.error = error
        except Exception as error:
            if not is_native(error):
                raise
            flight.error = translate(
                error, "preparing the transfer", backend=self.info.name, otherwise=DescriptorError
            )
        return None

    def _post(self, agent: NativeAgent, flight: Flight, handle: int, part: Part) -> None:
        try:
            status = agent.postXferReq(handle, b"")
        except Exception as error:
            if not is_native(error):
                raise
            if len(part.blocks) == 1 and not is_lost(error):
                # NIXL posts one descriptor after the other: here, none.
                self._failed(flight, error)
                agent.releaseXferReq(handle)
                return
            flight.posted = True
            flight.handles.append(handle)
            self._failed(flight, error)
            if not flight.peer.forgotten:
                self._give_up(flight)
            return
        flight.posted = True
        if status == self._in_progress:
            flight.handles.append(handle)
        else:
            agent.releaseXferReq(handle)

    def _failed(self, flight: Flight, native: Exception) -> None:
        peer, what = flight.peer, f"{flight.op.value} of transfer {flight.ticket}"
        error = translate(native, what, backend=self.info.name)
        if is_lost(native):
            peer.forgotten = True
            self._lose(peer, error)
        flight.error = flight.error or error
        self._settle(flight)

    def _give_up(self, flight: Flight) -> None:
        """Keep a flight for ever: part of it was posted and nothing proves its end."""
        flight.stuck = True
        self._stuck += 1
        _log.warning(
            "transfer kept: backend=%s ticket=%d error=%s",
            self.info.name,
            flight.ticket,
            flight.error,
        )

    def _settle(self, flight: Flight) -> None:
        flight.settle_until = time.monotonic() + self._config.settle_ms / 1000

    @staticmethod
    def _release(agent: NativeAgent, flight: Flight) -> None:
        """Release handles of which NIXL answers nothing any more."""
        for handle in flight.handles:
            with contextlib.suppress(Exception):
                agent.releaseXferReq(handle)
        flight.handles.clear()

    def _finish(self, flight: Flight) -> None:
        del self._flights[flight.ticket]
        flight.peer.in_flight -= 1
        self._events.append(Completion(flight.ticket, flight.error))
