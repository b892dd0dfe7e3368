"""The backend: one engine, one thread that makes its blocking calls.

Mooncake's engine takes a peer's segment (``host:port``), local and remote
addresses, and returns when all of a batch is over.  A thread makes these calls,
so that ``post`` and ``poll`` never wait; the engine releases the interpreter lock.

Quiet: a batch that succeeded is over.  About a failed one the engine says only
that *something* failed, so its end is reported when the peer is dead (nothing can
come from it any more), or when the batch had a single descriptor; otherwise
nothing is reported and the core keeps the memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvt_mooncake import INFO, MooncakeConfig
from kvtransport.backend import (
    Backend,
    Blocks,
    Completion,
    Event,
    Op,
    Probe,
    RegionSpec,
)
from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    BackendUnavailableError,
    BackpressureError,
    MalformedMetadataError,
    PeerLostError,
    RegistrationError,
    TransferFailedError,
)

PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer's engine listens, and its regions: id to (address, bytes)."""

    segment: str
    regions: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Job:
    """One posted transfer in the engine's terms."""

    ticket: int
    op: Op
    segment: str
    here: list[int]
    there: list[int]
    sizes: list[int]


class MooncakeBackend(Backend):
    """Moves host memory through Mooncake's TCP transport."""

    info = INFO

    def __init__(self) -> None:
        self._engine: Any = None
        self._regions: dict[int, tuple[int, int]] = {}
        self._users: dict[tuple[int, int], int] = {}
        self._peers: dict[int, Peer] = {}
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._open: set[int] = set()
        self._events: deque[Event] = deque()

    @classmethod
    def probe(cls, config: MooncakeConfig) -> Probe:
        del config
        if importlib.util.find_spec("mooncake") is None:
            return Probe(False, "the Python package mooncake is not installed", INFO.install_hint)
        return Probe(True, details={"listens": "every interface"})

    @classmethod
    def capabilities(cls, config: MooncakeConfig) -> Capabilities:
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=frozenset({("host", "host")}),
            failure_detection="on_use",
            detection_bound_s=10.0,
            progress="auto",
            # The target looks up addresses among its registered buffers, but knows no
            # access rights and no generations: nothing is promised.
            max_in_flight=config.max_in_flight,
        )

    def open(self, name: str, config: MooncakeConfig) -> None:
        # Its logs go to standard error from the first call on; errors are enough.
        os.environ.setdefault("GLOG_minloglevel", "3")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine, TransferOpcode
        except (ImportError, OSError) as error:
            raise BackendUnavailableError(
                f"mooncake cannot be loaded: {error}", hint=INFO.install_hint, backend="mooncake"
            ) from error
        engine = TransferEngine()
        code = engine.initialize(config.address, "P2PHANDSHAKE", config.protocol, config.device)
        if code:
            raise BackendUnavailableError(
                f"mooncake's engine did not start (code {code}) on {config.address} "
                f"with protocol {config.protocol}", backend="mooncake"
            )  # fmt: skip
        self._engine = engine
        self._opcodes = {Op.READ: TransferOpcode.Read, Op.WRITE: TransferOpcode.Write}
        self._segment = f"{config.address}:{engine.get_rpc_port()}"
        self._limit = config.max_in_flight
        self._thread = threading.Thread(target=self._work, name=f"mooncake-{name}", daemon=True)
        self._thread.start()

    # Memory ------------------------------------------------------------------------

    def register(self, region: RegionSpec) -> None:
        """Register; equal ranges share one registration, since the engine wants no overlap."""
        place = (region.address, region.nbytes)
        if place not in self._users:
            code = self._engine.register_memory(*place)
            if code:
                raise RegistrationError(
                    f"mooncake refused {region.nbytes} bytes at {region.address:#x} (code {code}); "
                    "it cannot register memory that overlaps another region", backend="mooncake"
                )  # fmt: skip
        self._users[place] = self._users.get(place, 0) + 1
        self._regions[region.region_id] = place

    def deregister(self, region_id: int) -> None:
        place = self._regions.pop(region_id)
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self._engine.unregister_memory(place[0])

    # Peers ---------------------------------------------------------------------------

    def export(self) -> bytes:
        return json.dumps({"segment": self._segment, "regions": self._regions}).encode()

    def import_peer(self, peer_id: int, body: bytes) -> None:
        try:
            decoded = json.loads(body)
            segment = str(decoded["segment"])
            regions = {
                int(region): (int(address), int(nbytes))
                for region, (address, nbytes) in decoded["regions"].items()
            }
            address(segment)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MalformedMetadataError(
                f"not a mooncake agent's metadata: {error}", backend="mooncake"
            ) from error
        self._peers[peer_id] = Peer(segment, regions)

    def drop_peer(self, peer_id: int) -> None:
        del self._peers[peer_id]

    # Transfers -----------------------------------------------------------------------

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        del notify  # declared absent, so the core never sends one
        if len(self._open) >= self._limit:
            raise BackpressureError(f"{self._limit} transfers are in flight", backend="mooncake")
        peer = self._peers[peer_id]
        here, there = [], []
        for local, low, remote, far in zip(
            blocks.local_region.tolist(), blocks.local_offset.tolist(),
            blocks.remote_region.tolist(), blocks.remote_offset.tolist(), strict=True,
        ):  # fmt: skip
            if remote not in peer.regions:
                raise TransferFailedError(f"the peer has no region {remote}", backend="mooncake")
            here.append(self._regions[local][0] + low)
            there.append((peer.regions[remote][0] + far) % (1 << 64))
        self._open.add(ticket)
        self._queue.put(Job(ticket, op, peer.segment, here, there, blocks.nbytes.tolist()))

    def cancel(self, ticket: int) -> None:
        raise_unsupported(ticket)

    def poll(self) -> Sequence[Event]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _work(self) -> None:
        """The thread: one transfer at a time, in the order of posting."""
        while (job := self._queue.get()) is not None:
            code = self._engine.batch_transfer_sync(
                job.segment, job.here, job.there, job.sizes, self._opcodes[job.op]
            )
            if code == 0:
                self._end(job, None)
            elif not alive(job.segment):
                lost = f"the engine at {job.segment} is gone"
                self._end(job, PeerLostError(lost, backend="mooncake"))
            elif len(job.sizes) == 1:
                failed = f"mooncake reports code {code}"
                self._end(job, TransferFailedError(failed, backend="mooncake"))

    def _end(self, job: Job, error: PeerLostError | TransferFailedError | None) -> None:
        self._open.discard(job.ticket)
        self._events.append(Completion(job.ticket, error))

    def close(self) -> None:
        if self._engine is None:
            return
        self._queue.put(None)
        self._thread.join(5.0)
        for address_, _ in self._users:
            self._engine.unregister_memory(address_)
        self._regions.clear()
        self._users.clear()
        self._peers.clear()
        self._engine = None


def raise_unsupported(ticket: int) -> None:
    """Cancel is declared absent."""
    from kvtransport.errors import UnsupportedError

    raise UnsupportedError(
        f"transfer {ticket} cannot be cancelled", capability="cancel", backend="mooncake"
    )


def address(segment: str) -> tuple[str, int]:
    """Split ``host:port``; raises ``ValueError``."""
    host, _, port = segment.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(f"{segment!r} is no host:port")
    return host, int(port)


def alive(segment: str) -> bool:
    """Whether something still listens where the peer's engine did."""
    try:
        with socket.create_connection(address(segment), PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
