"""Saboteurs that say "done" at the wrong time, or for the wrong thing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from kvtransport.backend import Blocks, Completion, Event, Op
from kvtransport.errors import BackpressureError, PeerLostError, TransferCancelledError
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur

MIB = 1 << 20
Posted = tuple[int, Op, int, Blocks, bytes | None]


_TRANSFERS = {
    "CAN": (1, 2, 3, 4, 5, 6),
    "CMP": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    "CON": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "DSC": (1, 2, 3, 4, 5, 7, 9, 10),
    "INT": (1, 2, 3, 4, 5),
    "MD": (1, 2, 5, 6, 7, 8, 9, 13),
    "NTF": (1, 2, 3, 4, 6, 7, 8, 9, 10),
    "ORD": (1, 2, 3, 4, 5),
    "PD": (1, 2, 3, 4, 5, 6, 7),
    "PRF": (1, 2, 3, 5, 6, 7),
    "RD": (1, 2, 3, 4, 5),
    "REG": (1, 3, 4, 5, 7, 8, 9, 10, 12),
    "SEC": (8,),
    "TD": (1, 2, 3, 4, 7, 8),
    "WR": (1, 2, 3, 4, 5),
}
EVERYTHING = [f"{group}-{at:02}" for group, numbers in _TRANSFERS.items() for at in numbers]
"""What needs transfers at all."""


class Swallows(BrokenBackend):
    """Base: completions in ``swallowed`` never come, those in ``extra`` come as well."""

    def __init__(self) -> None:
        super().__init__()
        self.swallowed: set[int] = set()
        self.extra: list[Event] = []

    def poll(self) -> Sequence[Event]:
        found = [
            event
            for event in self.inner.poll()
            if not (isinstance(event, Completion) and event.ticket in self.swallowed)
        ]
        found += self.extra
        self.extra = []
        return found


class Acknowledges(Swallows):
    """Base: what ``acknowledge`` gets is reported as done at once, and made ``DELAY_S`` later."""

    DELAY_S = 0.05

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[tuple[float, Posted]] = deque()

    def acknowledge(self, posted: Posted, completion: Completion) -> None:
        self._late.append((time.monotonic(), posted))
        self.swallowed.add(completion.ticket)
        self.extra.append(completion)

    def poll(self) -> Sequence[Event]:
        while self._late and time.monotonic() > self._late[0][0] + self.DELAY_S:
            self.inner.post(*self._late.popleft()[1])
        return super().poll()


@saboteur("CMP-02", "INT-03", "PRF-07", "REG-07", "WR-01", "WR-04")
class ReportsEarly(Acknowledges):
    """Reports large writes as done when they are accepted, long before they are made."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if op is Op.WRITE and len(blocks) == 1 and blocks.total_bytes >= 8 * MIB:
            self.acknowledge((ticket, op, peer_id, blocks, notify), Completion(ticket))
            return
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("ORD-03")
class AcknowledgesTheQueue(Acknowledges):
    """Calls a write of 256 KiB done when it is queued behind sixty others."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if len(self._open) >= 60 and blocks.total_bytes == MIB // 4:
            self.acknowledge((ticket, op, peer_id, blocks, notify), Completion(ticket))
            return
        self._open.add(ticket)
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        found = super().poll()
        self._open -= {event.ticket for event in found if isinstance(event, Completion)}
        return found


@saboteur("CMP-01")
class ReportsTwice(BrokenBackend):
    """Reports every fiftieth completion twice."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def poll(self) -> Sequence[Event]:
        found: list[Event] = []
        for event in self.inner.poll():
            found.append(event)
            if isinstance(event, Completion):
                self._count += 1
                if self._count % 50 == 0:
                    found.append(event)
        return found


@saboteur("CMP-03")
class BlocksInPoll(BrokenBackend):
    """Waits inside ``poll`` while a transfer of exactly 4 or 16 MiB is under way."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if len(blocks) == 1 and blocks.total_bytes in {4 * MIB, 16 * MIB}:
            self._open.add(ticket)
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        if self._open:
            time.sleep(0.06)
        found = self.inner.poll()
        self._open -= {event.ticket for event in found if isinstance(event, Completion)}
        return found


@saboteur("DSC-05")
class HangsAt31(Swallows):
    """Never finishes a transfer of exactly 31 descriptors."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if len(blocks) == 31:
            self.swallowed.add(ticket)
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("CMP-01", "CON-01", "CON-05")
class StallsAt128(BrokenBackend):
    """Reports nothing while more than 128 transfers are open."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 0
        self._kept: list[Event] = []

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self.inner.post(ticket, op, peer_id, blocks, notify)
        self._open += 1

    def poll(self) -> Sequence[Event]:
        self._kept += self.inner.poll()
        if self._open > 128:
            return []
        found, self._kept = self._kept, []
        self._open -= sum(isinstance(event, Completion) for event in found)
        return found


@saboteur("CAN-02", "CMP-06")
class LiesAboutCancel(Acknowledges):
    """Says that a cancelled transfer is quiet, and its data lands a moment later."""

    DELAY_S = 0.15

    def __init__(self) -> None:
        super().__init__()
        self._posted: dict[int, Posted] = {}

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self.inner.post(ticket, op, peer_id, blocks, notify)
        self._posted[ticket] = (ticket, op, peer_id, blocks, notify)

    def cancel(self, ticket: int) -> None:
        if ticket not in self._posted:
            return
        _, op, peer_id, blocks, _ = self._posted.pop(ticket)
        # Under a number of its own: the one of the cancelled transfer is in use.
        self._private += 1
        self.swallowed.add(self._private)
        ended = Completion(ticket, TransferCancelledError("cancelled"), cancelled=True)
        self.acknowledge((self._private, op, peer_id, blocks, None), ended)
        self.inner.cancel(ticket)

    def poll(self) -> Sequence[Event]:
        found = super().poll()
        for event in found:
            if isinstance(event, Completion):
                self._posted.pop(event.ticket, None)
        return found


@saboteur(
    "CAN-01", "CAN-02", "CAN-06", "CMP-10", "CON-07", "NTF-04", perhaps=["CAN-04", "CMP-06"]
)  # fmt: skip
class HangsOnCancel(Swallows):
    """Never reports the end of a cancelled transfer."""

    def cancel(self, ticket: int) -> None:
        self.swallowed.add(ticket)
        self.inner.cancel(ticket)


@saboteur("CAN-04")
class CancelsAll(BrokenBackend):
    """Cancels every open transfer when one is to be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self._open.add(ticket)
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def cancel(self, ticket: int) -> None:
        for other in sorted({ticket, *self._open}):
            self.inner.cancel(other)

    def poll(self) -> Sequence[Event]:
        found = self.inner.poll()
        self._open -= {event.ticket for event in found if isinstance(event, Completion)}
        return found


@saboteur("CMP-09", "NTF-04")
class NeedsPolling(BrokenBackend):
    """Declares automatic progress, but starts a transfer only when somebody polls."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Posted] = deque()

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self._queue.append((ticket, op, peer_id, blocks, notify))

    def poll(self) -> Sequence[Event]:
        refused: list[Event] = []
        while self._queue:
            try:
                self.inner.post(*self._queue[0])
            except BackpressureError:
                break
            except PeerLostError as error:
                refused.append(Completion(self._queue[0][0], error))
            self._queue.popleft()
        return [*self.inner.poll(), *refused]


@saboteur("PRF-07")
class CountersStand(BrokenBackend):
    """Declares counters as evidence of its path, and they never move."""

    def counters(self) -> dict[str, int]:
        return dict.fromkeys(self.inner.counters(), 0)


@saboteur(*EVERYTHING)
class FailsEverything(BrokenBackend):
    """Refuses every transfer with a typed error."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        raise PeerLostError(f"no: {ticket}, {op}, {peer_id}, {len(blocks)}, {notify!r:.20}")
