"""Seeded faults around any backend, to test what stands above it.

A failed transfer is reported only after the inner backend is quiet, so the layer
keeps the contract unless it is told to break it (``duplicate_rate``,
``drop_rate``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from kvtransport.backend import Backend, Blocks, Completion, Event, Op, PeerDown
from kvtransport.errors import (
    BackpressureError,
    ConfigError,
    PeerLostError,
    TransferFailedError,
)
from kvtransport.layers.base import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong, and how often; rates are probabilities from 0 to 1.

    ``fail_after``: every transfer after the first n fails.  ``fail_rate``: any
    one fails.  ``refuse_first`` and ``refuse_rate``: posts are refused with
    ``BackpressureError``.  ``delay_polls``: a completion is held for up to so
    many calls of ``poll``.  ``reorder``: events come in random order.
    ``duplicate_rate`` and ``drop_rate``: a completion comes twice, or never.
    ``peer_down_after``: after n posts their peer is reported down and all later
    transfers with it fail.
    """

    seed: int = 0
    fail_after: int | None = None
    fail_rate: float = 0.0
    refuse_first: int = 0
    refuse_rate: float = 0.0
    delay_polls: int = 0
    reorder: bool = False
    duplicate_rate: float = 0.0
    drop_rate: float = 0.0
    peer_down_after: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_rate") and not 0 <= value <= 1:
                raise ConfigError(f"{field.name} must be from 0 to 1, got {value!r}")


class FaultLayer(Layer):
    """Wraps ``inner`` and injects the faults of ``plan``; same seed, same faults."""

    def __init__(self, inner: Backend, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan
        self.injected: Counter[str] = Counter()
        self._random = random.Random(plan.seed)  # noqa: S311  # repeatable on purpose
        self._posts = 0
        self._refused = 0
        self._doomed: dict[int, Exception] = {}
        self._down: set[int] = set()
        self._held: list[tuple[int, Event]] = []
        self._polls = 0

    def _hits(self, rate: float, what: str) -> bool:
        if rate and self._random.random() < rate:
            self.injected[what] += 1
            return True
        return False

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        plan = self.plan
        if self._refused < plan.refuse_first:
            self._refused += 1
            self.injected["refuse"] += 1
            raise BackpressureError("injected fault: queue is full")
        if self._hits(plan.refuse_rate, "refuse"):
            raise BackpressureError("injected fault: queue is full")
        error = self._fate(peer_id)
        # A failed transfer must not announce success to the other side.
        self.inner.post(ticket, op, peer_id, blocks, None if error else notify)
        if error is not None:
            self._doomed[ticket] = error
            self.injected["fail"] += 1
        self._posts += 1
        if self._posts == plan.peer_down_after:
            self._lose(peer_id)

    def _fate(self, peer_id: int) -> Exception | None:
        plan = self.plan
        if peer_id in self._down:
            return PeerLostError("injected fault: peer is down")
        if plan.fail_after is not None and self._posts >= plan.fail_after:
            return TransferFailedError(f"injected fault: transfer after {plan.fail_after}")
        if plan.fail_rate and self._random.random() < plan.fail_rate:
            return TransferFailedError("injected fault: transfer failed")
        return None

    def _lose(self, peer_id: int) -> None:
        self.injected["peer_down"] += 1
        self._down.add(peer_id)
        error = PeerLostError("injected fault: peer is down")
        self._held.append((self._polls, PeerDown(peer_id, error)))

    def poll(self) -> Sequence[Event]:
        self._polls += 1
        for event in self.inner.poll():
            if isinstance(event, Completion):
                self._take(event)
            else:
                self._held.append((self._polls, event))
        due = [event for at, event in self._held if at <= self._polls]
        self._held = [(at, event) for at, event in self._held if at > self._polls]
        if self.plan.reorder:
            self._random.shuffle(due)
        return due

    def _take(self, event: Completion) -> None:
        error = self._doomed.pop(event.ticket, None)
        if error is not None and event.error is None and not event.cancelled:
            assert isinstance(error, TransferFailedError | PeerLostError)
            event = Completion(event.ticket, error)
        if self._hits(self.plan.drop_rate, "drop"):
            return
        at = self._polls + self._random.randint(0, self.plan.delay_polls)
        if at > self._polls:
            self.injected["delay"] += 1
        self._held.append((at, event))
        if self._hits(self.plan.duplicate_rate, "duplicate"):
            self._held.append((at, event))

    def counters(self) -> Mapping[str, int]:
        return {**self.inner.counters(), **{f"fault_{k}": v for k, v in self.injected.items()}}
