"""Saboteurs of notifications."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtransport import registry
from kvtransport.backend import Blocks, Completion, Event, Notification, Op
from kvtransport.capabilities import Capabilities
from kvtransport.plan import EMPTY
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur


class Private(BrokenBackend):
    """Base: completions of private posts never reach the core."""

    def mine(self, event: Event) -> bool:
        return isinstance(event, Completion) and event.ticket > self.PRIVATE

    def poll(self) -> Sequence[Event]:
        return [event for event in self.inner.poll() if not self.mine(event)]


@saboteur("NTF-02", "NTF-04", "ORD-01")
class NotifiesEarly(Private):
    """Sends the message when a transfer of several descriptors begins."""

    DELAY_S = 0.02

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[tuple[float, tuple[int, Op, int, Blocks]]] = deque()

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if notify is None or len(blocks) < 2:
            self.inner.post(ticket, op, peer_id, blocks, notify)
            return
        self.extra_post(op, peer_id, EMPTY, notify)
        self._late.append((time.monotonic(), (ticket, op, peer_id, blocks)))

    def cancel(self, ticket: int) -> None:
        while self._late:
            self.inner.post(*self._late.popleft()[1], None)
        self.inner.cancel(ticket)

    def poll(self) -> Sequence[Event]:
        while self._late and time.monotonic() > self._late[0][0] + self.DELAY_S:
            self.inner.post(*self._late.popleft()[1], None)
        return super().poll()


@saboteur("NTF-01")
class CutsAtNul(BrokenBackend):
    """Takes a payload for a C string."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        text = None if notify is None else notify.split(b"\0")[0]
        self.inner.post(ticket, op, peer_id, blocks, text)


@saboteur("NTF-02", "NTF-03", "NTF-08")
class DoublesNotify(BrokenBackend):
    """Delivers every hundredth message twice."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def poll(self) -> Sequence[Event]:
        found: list[Event] = []
        for event in self.inner.poll():
            found.append(event)
            if isinstance(event, Notification):
                self._count += 1
                found += [event] if self._count % 100 == 0 else []
        return found


@saboteur("NTF-04")
class NotifiesOnFailure(Private):
    """Sends the message of a transfer that failed or was cancelled all the same."""

    def __init__(self) -> None:
        super().__init__()
        self._owed: dict[int, tuple[int, bytes]] = {}

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if notify is not None:
            self._owed[ticket] = (peer_id, notify)
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        found = super().poll()
        for event in found:
            owed = self._owed.pop(event.ticket, None) if isinstance(event, Completion) else None
            if owed is not None and isinstance(event, Completion) and event.error is not None:
                self.extra_post(Op.WRITE, owed[0], EMPTY, owed[1])
        return found


@saboteur("NTF-06")
class SpoofsSender(BrokenBackend):
    """Attributes every message to the peer it met first."""

    def __init__(self) -> None:
        super().__init__()
        self._first = 0

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self.inner.import_peer(peer_id, body)
        self._first = self._first or peer_id

    def poll(self) -> Sequence[Event]:
        return [
            replace(event, peer_id=self._first) if isinstance(event, Notification) else event
            for event in self.inner.poll()
        ]


@saboteur("DSC-07", "NTF-06", "NTF-07", "NTF-08", "NTF-09")
class DropsStandalone(BrokenBackend):
    """Forgets the message of a transfer without data."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self.inner.post(ticket, op, peer_id, blocks, notify if len(blocks) else None)


@saboteur("NTF-09")
class DropsWhenSlow(BrokenBackend):
    """Drops messages beyond five hundred that nobody has read."""

    def poll(self) -> Sequence[Event]:
        found = self.inner.poll()
        messages = [event for event in found if isinstance(event, Notification)]
        others = [event for event in found if not isinstance(event, Notification)]
        return [*others, *messages[:500]]


@saboteur("NTF-08")
class ClaimsOrder(BrokenBackend):
    """Declares order per peer, and delivers what came together backwards."""

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return replace(registry.load("host").capabilities(config), ordering="per_peer")

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Event] = []
        self._since = 0.0

    def poll(self) -> Sequence[Event]:
        # Messages wait for company, so that there is an order to get wrong.
        found = self.inner.poll()
        fresh = [event for event in found if isinstance(event, Notification)]
        if fresh and not self._kept:
            self._since = time.monotonic()
        self._kept += fresh
        others = [event for event in found if not isinstance(event, Notification)]
        if not self._kept or time.monotonic() < self._since + 0.01:
            return others
        due, self._kept = self._kept[::-1], []
        return [*others, *due]
