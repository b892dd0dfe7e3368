"""A layer that sees every call between the core and the backend under test.

It records what checks need (completions per ticket, regions that the backend
holds, time spent in ``poll``, calls that overlapped), can narrow a declaration,
and lets a check speak to the backend past the core's own validation.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvtransport.backend import (
    Backend,
    Blocks,
    Completion,
    Event,
    Notification,
    Op,
    PeerDown,
    RegionSpec,
)
from kvtransport.capabilities import Capabilities
from kvtransport.errors import KVTransportError
from kvtransport.layers.base import Layer

PRIVATE_TICKETS = 1 << 48
"""Tickets from here on belong to checks; the core never sees their completions."""


class Tap(Layer):
    """Wraps the backend ``inner``; thread-safe as far as ``inner`` is.

    ``narrow`` replaces fields of the declared capabilities, so that the core's
    handling of an absent capability can be tested on any backend.
    """

    def __init__(self, inner: Backend, narrow: Mapping[str, Any] | None = None) -> None:
        super().__init__(inner)
        self._narrow = dict(narrow or {})
        self._private = PRIVATE_TICKETS
        self._lock = threading.Lock()
        self._inside: Counter[int] = Counter()
        self.raw_events: list[Completion] = []
        self.completions: Counter[int] = Counter()
        self.posted: dict[int, int] = {}
        """Bytes by ticket."""
        self.attempts = 0
        """Posts that reached the backend, refused ones included."""
        self.moved = 0
        self.regions: set[int] = set()
        self.peers_down: list[int] = []
        self.notified = 0
        self.poll_seconds: list[float] = []
        self.post_seconds: list[float] = []
        self.overlaps = 0
        self.foreign_errors: list[str] = []

    # Declaration -----------------------------------------------------------------

    def capabilities(self, config: Any) -> Capabilities:  # type: ignore[override]
        declared = self.inner.capabilities(config)
        return replace(declared, **self._narrow) if self._narrow else declared

    # Pass-through ----------------------------------------------------------------

    def open(self, name: str, config: Any) -> None:
        with self._call():
            self.inner.open(name, config)

    def register(self, region: RegionSpec) -> None:
        with self._call():
            self.inner.register(region)
        self.regions.add(region.region_id)

    def deregister(self, region_id: int) -> None:
        with self._call():
            self.inner.deregister(region_id)
        self.regions.discard(region_id)

    def export(self) -> bytes:
        with self._call():
            return self.inner.export()

    def import_peer(self, peer_id: int, body: bytes) -> None:
        with self._call():
            self.inner.import_peer(peer_id, body)

    def drop_peer(self, peer_id: int) -> None:
        with self._call():
            self.inner.drop_peer(peer_id)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self.attempts += 1
        started = time.monotonic()
        with self._call():
            self.inner.post(ticket, op, peer_id, blocks, notify)
        self.post_seconds.append(time.monotonic() - started)
        self.posted[ticket] = blocks.total_bytes

    def cancel(self, ticket: int) -> None:
        with self._call():
            self.inner.cancel(ticket)

    def poll(self) -> Sequence[Event]:
        started = time.monotonic()
        with self._call():
            events = self.inner.poll()
        self.poll_seconds.append(time.monotonic() - started)
        return [event for event in events if self._keep(event)]

    def close(self) -> None:
        with self._call():
            self.inner.close()
        self.regions.clear()

    def __getattr__(self, name: str) -> Any:
        # Optional abilities of a backend (bind_thread, event_fd, ...) stay visible.
        return getattr(self.inner, name)

    # Past the core ---------------------------------------------------------------

    def raw_post(self, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> int:
        """Post descriptors that the core has not validated; return a private ticket."""
        self._private += 1
        self.post(self._private, op, peer_id, blocks, notify)
        return self._private

    def raw_result(self, ticket: int) -> Completion | None:
        return next((event for event in self.raw_events if event.ticket == ticket), None)

    # Recording -------------------------------------------------------------------

    def _keep(self, event: Event) -> bool:
        if isinstance(event, Completion):
            self.completions[event.ticket] += 1
            if event.error is None and not event.cancelled:
                self.moved += self.posted.get(event.ticket, 0)
            if event.ticket > PRIVATE_TICKETS:
                self.raw_events.append(event)
                return False
        elif isinstance(event, PeerDown):
            self.peers_down.append(event.peer_id)
        elif isinstance(event, Notification):
            self.notified += 1
        return True

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count calls that overlap another thread's, and errors outside the tree."""
        thread = threading.get_ident()
        with self._lock:
            if any(count and other != thread for other, count in self._inside.items()):
                self.overlaps += 1
            self._inside[thread] += 1
        try:
            yield
        except Exception as error:
            if not isinstance(error, KVTransportError):
                self.foreign_errors.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._inside[thread] -= 1
