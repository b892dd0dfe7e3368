"""Saboteurs of registration, teardown and quiet."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtransport import registry
from kvtransport.backend import Blocks, Completion, Event, Op, RegionSpec
from kvtransport.capabilities import Capabilities
from kvtransport.errors import RegistrationError, TransferFailedError
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur

log = logging.getLogger("kvtransport.backends.saboteur")


@saboteur("CON-08", "REG-04")
class DeregistersByAddress(BrokenBackend):
    """Drops every region of a buffer when one of them is deregistered."""

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[int, int] = {}

    def register(self, region: RegionSpec) -> None:
        self.inner.register(region)
        self._addresses[region.region_id] = region.address

    def deregister(self, region_id: int) -> None:
        gone = self._addresses.get(region_id)
        for other in [key for key, address in self._addresses.items() if address == gone]:
            del self._addresses[other]
            self.inner.deregister(other)


@saboteur("REG-09")
class EvictsOldRegions(BrokenBackend):
    """Makes room for a fourth region by forgetting the first."""

    def __init__(self) -> None:
        super().__init__()
        self._order: deque[int] = deque()

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return replace(registry.load("host").capabilities(config), max_regions=8)

    def register(self, region: RegionSpec) -> None:
        if len(self._order) == 7:
            self.inner.deregister(self._order.popleft())
        self.inner.register(region)
        self._order.append(region.region_id)

    def deregister(self, region_id: int) -> None:
        if region_id in self._order:
            self._order.remove(region_id)
            self.inner.deregister(region_id)


@saboteur("PRF-01", "PRF-04", "PRF-05", "REG-12")
class RefusesLargeRegions(BrokenBackend):
    """Declares no limit, and refuses regions of 64 MiB and more."""

    def register(self, region: RegionSpec) -> None:
        if region.nbytes >= 64 << 20:
            raise RegistrationError("out of translation entries")
        self.inner.register(region)


@saboteur("CON-06")
class RegistrationDisturbs(BrokenBackend):
    """Loses the transfers in flight when memory is registered."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()
        self._lost: list[Event] = []

    def register(self, region: RegionSpec) -> None:
        self.inner.register(region)
        error = TransferFailedError("flushed by a registration")
        self._lost += [Completion(ticket, error) for ticket in self._open]
        self._open.clear()

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self.inner.post(ticket, op, peer_id, blocks, notify)
        self._open.add(ticket)

    def poll(self) -> Sequence[Event]:
        lost, self._lost = self._lost, []
        gone = {event.ticket for event in lost if isinstance(event, Completion)}
        found = self.inner.poll()
        self._open -= {event.ticket for event in found if isinstance(event, Completion)}
        kept = [e for e in found if not (isinstance(e, Completion) and e.ticket in gone)]
        return [*kept, *lost]


@saboteur("TD-01")
class SecondCloseRaises(BrokenBackend):
    """Breaks when it is closed twice."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = False

    def close(self) -> None:
        if self._closed:
            raise RuntimeError("already closed")
        self._closed = True
        self.inner.close()


class Leaky(BrokenBackend):
    """Base: keeps something at ``close``, only for agents whose name holds ``names``.

    The restriction keeps the set of checks that see the leak small and exact.
    """

    names = ""

    def open(self, name: str, config: Any) -> None:
        self._leaks = self.names in name
        self.inner.open(name, config)

    def close(self) -> None:
        if self._leaks:
            self._leaks = False
            self.leak()
        self.inner.close()

    def leak(self) -> None:
        raise NotImplementedError


@saboteur("TD-03")
class LeaksDescriptor(Leaky):
    """Leaves a file open at every close."""

    names = "cycle"

    def leak(self) -> None:
        os.open(os.devnull, os.O_RDONLY)


@saboteur("TD-04")
class LeaksThread(Leaky):
    """Leaves a thread waiting for ever at every close."""

    names = "once"

    def leak(self) -> None:
        threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()


@saboteur("DSC-10", "NTF-08", "NTF-09")
class LeaksPerPost(BrokenBackend):
    """Leaves a file open in every hundredth use of a prepared transfer."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Blocks | None = None
        self._uses = 0

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self._uses = self._uses + 1 if blocks is self._last else 0
        self._last = blocks
        if self._uses % 100 == 99:
            os.open(os.devnull, os.O_RDONLY)
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("TD-07")
class HangsAtExit(BrokenBackend):
    """Runs a thread that only ``close`` ends, and the interpreter waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._stop = threading.Event()

    def open(self, name: str, config: Any) -> None:
        self.inner.open(name, config)
        threading.Thread(target=self._stop.wait, name="held").start()

    def close(self) -> None:
        self._stop.set()
        self.inner.close()


@saboteur("TD-08")
class LogsWarnings(BrokenBackend):
    """Warns about nothing at every first transfer."""

    def __init__(self) -> None:
        super().__init__()
        self._warned = False

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if not self._warned:
            self._warned = True
            log.warning("falling back to something slow")
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("CON-02", "CON-07")
class OwnsOneThread(BrokenBackend):
    """Declares that any thread may call it, and refuses all but the first."""

    def open(self, name: str, config: Any) -> None:
        self._thread = threading.get_ident()
        self.inner.open(name, config)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("device context is not current on this thread")
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur()
class PrintsGarbage(BrokenBackend):
    """Fills standard output with text and broken JSON; this must not matter to anybody."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        os.write(1, b'{"id": 1, "ok": tru\n\xff\xfe{"result": {"status": "PASS"}}\n')
        self.inner.post(ticket, op, peer_id, blocks, notify)
