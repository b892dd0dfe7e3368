"""A backend inside one process, for tests of the core alone.

Agents find each other in a table; completions wait for ``poll`` and, when
``held`` is set, for the test.  The real backends have tests with two processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvtransport.backend import (
    Backend,
    BackendInfo,
    Blocks,
    Completion,
    Event,
    Notification,
    Op,
    Probe,
    RegionSpec,
)
from kvtransport.capabilities import Capabilities
from kvtransport.errors import BackpressureError, MalformedMetadataError, PeerLostError

CAPABILITIES = Capabilities(
    ops=frozenset({"read", "write"}),
    memory=frozenset({("host", "host")}),
    notify="inline",
    notify_after_data=True,
    cancel="drain",
    max_notify_bytes=1024,
)


@dataclass(frozen=True, slots=True)
class LoopbackConfig:
    """Options of the test backend."""

    capabilities: Capabilities = CAPABILITIES
    label: str = field(default="", metadata={"help": "shown nowhere"})


class Loopback(Backend):
    info = BackendInfo(
        name="loopback",
        summary="inside one process",
        config=LoopbackConfig,
        load=lambda: Loopback,
        wire="loopback/1",
    )
    agents: ClassVar[dict[str, Loopback]] = {}

    def __init__(self) -> None:
        self.held = False
        self.events: list[Event] = []
        self.open_posts: dict[int, tuple[Op, int, Blocks, bytes | None]] = {}
        self.posts: list[Blocks] = []
        self.regions: dict[int, RegionSpec] = {}
        self.peers: dict[int, str] = {}
        self.cancelled: list[int] = []
        self.calls: list[str] = []
        self.refuse_posts = 0
        self.closed = False

    @classmethod
    def probe(cls, config: Any) -> Probe:
        return Probe(available=True)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return config.capabilities

    def open(self, name: str, config: Any) -> None:
        self.name = name
        self.agents[name] = self

    def register(self, region: RegionSpec) -> None:
        self.regions[region.region_id] = region

    def deregister(self, region_id: int) -> None:
        self.calls.append(f"deregister {region_id}")
        del self.regions[region_id]

    def export(self) -> bytes:
        return self.name.encode()

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self.calls.append(f"import {peer_id}")
        try:
            name = body.decode()
        except UnicodeDecodeError as error:
            raise MalformedMetadataError("body is not a name") from error
        if name not in self.agents:
            raise PeerLostError(f"no agent {name!r}")
        self.peers[peer_id] = name

    def drop_peer(self, peer_id: int) -> None:
        self.calls.append(f"drop {peer_id}")
        del self.peers[peer_id]

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if self.refuse_posts:
            self.refuse_posts -= 1
            raise BackpressureError("queue is full")
        self.open_posts[ticket] = (op, peer_id, blocks, notify)
        self.posts.append(blocks)
        if not self.held:
            self.finish(ticket)

    def finish(self, ticket: int, error: Any = None) -> None:
        """Move the bytes of a post, unless it fails, and report it."""
        op, peer_id, blocks, notify = self.open_posts.pop(ticket)
        if error is None:
            self._move(op, self.agents[self.peers[peer_id]], blocks)
            if notify is not None:
                self._tell(self.peers[peer_id], notify)
        self.events.append(Completion(ticket, error))

    def finish_all(self) -> None:
        for ticket in list(self.open_posts):
            self.finish(ticket)

    def _move(self, op: Op, other: Loopback, blocks: Blocks) -> None:
        rows = zip(
            blocks.local_region.tolist(),
            blocks.local_offset.tolist(),
            blocks.remote_region.tolist(),
            blocks.remote_offset.tolist(),
            blocks.nbytes.tolist(),
            strict=True,
        )
        for local, lo, remote, ro, n in rows:
            here = self.regions[local].address + lo
            there = other.regions[remote].address + ro
            to, source = (here, there) if op is Op.READ else (there, here)
            ctypes.memmove(to, source, n)

    def _tell(self, name: str, payload: bytes) -> None:
        other = self.agents[name]
        for peer_id, peer in other.peers.items():
            if peer == self.name:
                other.events.append(Notification(peer_id, payload))

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        if not self.held and self.open_posts.pop(ticket, None):
            self.events.append(Completion(ticket, cancelled=True))

    def poll(self) -> Sequence[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.closed = True
        self.agents.pop(getattr(self, "name", ""), None)

    def counters(self) -> Mapping[str, int]:
        return {"posts": len(self.posts)}
