"""One opened agent with its test memory, driven by named operations.

The same class serves both sides: a check calls it directly in the worker and
over JSON lines in a peer (``sides.Side`` is the common face).  Every operation
takes and returns plain values; handles are names and numbers.

Threading: one thread at a time, except ``agent`` itself, which checks may use
from threads of their own.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtransport.agent import Agent
from kvtransport.errors import KVTransportError
from kvtransport.layout.blocks import Pair
from kvtransport.peer import Peer, RemoteRegion
from kvtransport.region import Region
from kvtransport.transfer import Transfer
from kvtransport_conformance import resources
from kvtransport_conformance.load import Load
from kvtransport_conformance.loading import Loaded, open_agent
from kvtransport_conformance.memory import Memory, allocate
from kvtransport_conformance.past import PastTheCore
from kvtransport_conformance.tap import Tap
from kvtransport_conformance.wire_errors import describe

Piece = Sequence[Any]
"""``[local, remote, local_offsets, remote_offsets, nbytes]``: names and vectors."""

_IDLE_S = 0.0005


class Station(PastTheCore, Load):
    """Operations of one agent; ``loaded`` says which backend and memory to use."""

    def __init__(self, name: str, loaded: Loaded) -> None:
        self.name = name
        self.loaded = loaded
        self.memory: dict[str, Memory] = {}
        self.regions: dict[str, Region] = {}
        self.peers: dict[str, Peer] = {}
        self.stale: dict[str, RemoteRegion] = {}
        self.transfers: dict[int, Transfer] = {}
        self.inbox: list[tuple[str, bytes]] = []
        self.polling = True
        self._agent: Agent | None = None
        self._tap: Tap | None = None

    # Agent -----------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        """The agent; opened on first use."""
        if self._agent is None:
            self.open()
        assert self._agent is not None
        return self._agent

    @property
    def opened(self) -> bool:
        return self._agent is not None

    @property
    def tap(self) -> Tap:
        self.agent  # noqa: B018  # opens on first use
        assert self._tap is not None
        return self._tap

    def open(
        self,
        agent_name: str = "",
        fingerprint: bytes = b"",
        narrow: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        faults: Mapping[str, Any] | None = None,
        wire: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the agent.

        ``narrow`` overrides declared capabilities, ``config`` the backend's
        options, ``wire`` the protocol it claims, ``options`` the agent's own;
        ``faults`` puts the fault layer between core and backend.
        """
        self._agent, self._tap = open_agent(
            self.loaded,
            agent_name or self.name,
            fingerprint=fingerprint,
            narrow=narrow,
            config=config,
            faults=faults,
            wire=wire,
            options=options,
        )

    def close(self, drain_s: float = 5.0) -> str:
        """Close the agent; return the error it raised as text, or ""."""
        agent, self._agent = self._agent, None
        if agent is None:
            return ""
        resources.note_shared_memory()
        try:
            agent.close(drain_s=drain_s)
        except KVTransportError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.transfers.clear()
            self.regions.clear()
            self.peers.clear()
            self.stale.clear()
            self._tap = None
        return ""

    def reset(self, drain_s: float = 5.0) -> str:
        """Close the agent and free the memory; return what closing complained about."""
        complaint = self.close(drain_s)
        for memory in self.memory.values():
            memory.kit.free(memory.buffer)
        self.memory.clear()
        self.inbox.clear()
        self.polling = True
        return complaint

    def pump(self) -> None:
        """Progress an open agent once, as an engine's step does."""
        if self.polling and self._agent is not None:
            self._agent.progress()

    def set_polling(self, on: bool) -> None:
        self.polling = on

    # Memory ----------------------------------------------------------------------

    def alloc(self, name: str, nbytes: int, pattern: Sequence[Any], kind: str = "",
              skip: int = 0) -> None:  # fmt: skip
        """Allocate ``nbytes``, ``skip`` bytes into a buffer, filled with ``pattern``."""
        kit = self.loaded.kit(kind)
        self.memory[name] = allocate(kit, nbytes, skip)
        self.memory[name].fill(pattern)

    def fill(self, name: str, pattern: Sequence[Any]) -> None:
        self.memory[name].fill(pattern)

    def poke(self, name: str, offset: int, data: bytes) -> None:
        self.memory[name].write(offset, data)

    def peek(self, name: str, offset: int, nbytes: int) -> bytes:
        """Look at a few bytes without copying the whole buffer where that is possible."""
        return self.memory[name].peek(offset, nbytes)

    def digest(self, name: str) -> str:
        return hashlib.blake2b(self.memory[name].dump().data, digest_size=16).hexdigest()

    def mismatch(self, name: str, expected: Sequence[Any]) -> str:
        return self.memory[name].mismatch(expected)

    def forget(self, name: str) -> None:
        """Drop this station's own reference to a buffer without freeing it."""
        del self.memory[name]

    # Regions ---------------------------------------------------------------------

    def register(
        self, name: str, buffer: str = "", access: str = "rw", kind: str = "",
        nbytes: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Register buffer ``buffer`` (default: ``name``); return [region id, generation].

        ``nbytes`` registers only the beginning of a host buffer.
        """
        memory = self.memory[buffer or name]
        source = memory.registrable()
        region = self.agent.register(
            source if nbytes is None else source[:nbytes],
            name=name,
            kind=kind or memory.kit.kind,
            device=memory.kit.device,
            access=access,
        )
        self.regions[name] = region
        return [region.region_id, region.generation]

    def deregister(self, name: str, drain_s: float = 0.0) -> None:
        self.agent.deregister(self.regions[name], drain_s=drain_s)
        del self.regions[name]

    def held_regions(self) -> int:
        """Regions that the backend holds now."""
        return len(self.tap.regions)

    # Peers -----------------------------------------------------------------------

    def metadata(self) -> bytes:
        return self.agent.metadata()

    def add_peer(self, blob: bytes, key: str = "peer") -> list[Any]:
        """Import a peer under ``key``; return [peer id, incarnation, region names]."""
        peer = self.agent.add_peer(blob)
        self.peers[key] = peer
        return [peer.peer_id, bytes(peer.incarnation), sorted(peer.regions)]

    def remove_peer(self, key: str = "peer", drain_s: float = 2.0) -> None:
        self.agent.remove_peer(self.peers[key], drain_s=drain_s)

    def keep_region(self, name: str, key: str = "peer") -> None:
        """Remember a remote region as it is now; pieces use it as ``~name``."""
        self.stale[name] = self.peers[key].region(name)

    # Transfers -------------------------------------------------------------------

    def pairs(self, pieces: Sequence[Piece], key: str) -> list[Any]:
        return [
            Pair.ranges(self.regions[local], lo, self._remote(remote, key), ro, n)
            for local, remote, lo, ro, n in pieces
        ]

    def _remote(self, name: str, key: str) -> RemoteRegion:
        if name.startswith("~"):
            return self.stale[name[1:]]
        return self.peers[key].region(name)

    def post(
        self, op: str, pieces: Sequence[Piece], key: str = "peer",
        deadline_s: float = 20.0, notify: bytes | None = None,
    ) -> int:  # fmt: skip
        """Post a transfer; return its number."""
        call = self.agent.read if op == "read" else self.agent.write
        pairs = self.pairs(pieces, key)
        transfer = call(self.peers[key], pairs, deadline_s=deadline_s, notify=notify)
        self.transfers[transfer.transfer_id] = transfer
        return int(transfer.transfer_id)

    def wait(self, number: int, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for a terminal state; return it without raising the transfer's error."""
        transfer = self.transfers[number]
        try:
            transfer.wait(timeout_s)
        except KVTransportError as error:
            return self.state(number) | {"raised": describe(error)}
        return self.state(number) | {"raised": None}

    def settle(self, number: int, patience_s: float) -> dict[str, Any]:
        """Poll until the transfer is terminal or ``patience_s`` passed."""
        deadline = time.monotonic() + patience_s
        while not self.transfers[number].done and time.monotonic() < deadline:
            self.agent.progress()
            time.sleep(_IDLE_S)
        return self.state(number)

    def state(self, number: int) -> dict[str, Any]:
        transfer = self.transfers[number]
        error = transfer.error
        return {
            "state": transfer.state.value,
            "error": None if error is None else describe(error),
            "nbytes": transfer.nbytes,
            "descriptors": transfer.descriptors,
        }

    def cancel(self, number: int) -> None:
        self.transfers[number].cancel()

    def move(
        self, op: str, pieces: Sequence[Piece], key: str = "peer",
        deadline_s: float = 20.0, notify: bytes | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Post, wait, and raise what went wrong."""
        number = self.post(op, pieces, key, deadline_s, notify)
        self.transfers[number].wait()
        return self.state(number)

    def notify(self, payload: bytes, key: str = "peer") -> dict[str, Any]:
        """Send a message that belongs to no data, and wait for its end."""
        transfer = self.agent.notify(self.peers[key], payload)
        self.transfers[transfer.transfer_id] = transfer
        transfer.wait()
        return self.state(transfer.transfer_id)

    def notifications(self) -> list[list[Any]]:
        """Everything received since the last call: [peer's agent name, payload]."""
        return [[event.peer.name, bytes(event.payload)] for event in self.agent.notifications()]

    def await_notifications(self, count: int, patience_s: float) -> list[list[Any]]:
        """Poll until ``count`` notifications came or ``patience_s`` passed."""
        found: list[list[Any]] = []
        deadline = time.monotonic() + patience_s
        while len(found) < count and time.monotonic() < deadline:
            found += self.notifications()
            time.sleep(_IDLE_S)
        return found


def in_thread(function: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread for a check; the check joins it."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread
