"""Rung 1 of the fault ladder: a layer between core and backend that misbehaves on order.

It certifies no vendor: it shows that the core, on top of the vendor's backend,
keeps its promises when completions are late, lost, doubled or out of order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtransport.backend import Backend, Blocks, Completion, Event, Op
from kvtransport.errors import TransferFailedError
from kvtransport.layers.base import Layer
from kvtransport.layers.fault import FaultLayer, FaultPlan


class HoldLayer(Layer):
    """Holds completions back for a time, and refuses the n-th post with a lasting error."""

    def __init__(self, inner: Backend, hold_s: float, fail_post: int) -> None:
        super().__init__(inner)
        self._hold_s = hold_s
        self._fail_post = fail_post
        self._posts = 0
        self._held: list[tuple[float, Event]] = []

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self._posts += 1
        if self._posts == self._fail_post:
            raise TransferFailedError("injected fault: this post fails")
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        now = time.monotonic()
        for event in self.inner.poll():
            delay = self._hold_s if isinstance(event, Completion) else 0.0
            self._held.append((now + delay, event))
        due = [event for at, event in self._held if at <= now]
        self._held = [(at, event) for at, event in self._held if at > now]
        return due


def faulty(inner: Backend, faults: Mapping[str, Any]) -> Backend:
    """Wrap ``inner`` in the core's ``FaultLayer``, configured by ``faults``.

    Beside the fields of ``FaultPlan``: ``hold_completions_s`` delays completions
    by a time, ``fail_post`` makes the n-th post raise.
    """
    rest = dict(faults)
    hold_s, fail_post = rest.pop("hold_completions_s", 0.0), rest.pop("fail_post", 0)
    layer: Backend = FaultLayer(inner, FaultPlan(**rest))
    return HoldLayer(layer, hold_s, fail_post) if hold_s or fail_post else layer
