"""Rung 1 of the fault ladder: a layer between core and backend that misbehaves on order.

It certifies no vendor: it shows that the core, on top of the vendor's backend,
keeps its promises when completions are late, lost, doubled or out of order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtransport.backend import (
    Backend,
    BackendInfo,
    Blocks,
    Completion,
    Event,
    Op,
    Probe,
    RegionSpec,
)
from kvtransport.capabilities import Capabilities
from kvtransport.errors import ConfigError, TransferFailedError

_KNOWN = frozenset(
    {"hold_completions_s", "lose_completions", "double_completions", "reorder", "fail_post",
     "fail_completion", "seed"}
)  # fmt: skip


class FaultyLayer(Backend):
    """Faults by count or seed; see ``faulty`` for their names."""

    def __init__(self, inner: Backend, faults: Mapping[str, Any]) -> None:
        unknown = set(faults) - _KNOWN
        if unknown:
            raise ConfigError(f"unknown faults {sorted(unknown)}; known: {sorted(_KNOWN)}")
        self.inner = inner
        self.info: BackendInfo = inner.info  # type: ignore[misc]  # per instance on purpose
        self._faults = dict(faults)
        self._random = random.Random(faults.get("seed", 0))  # noqa: S311  # reproducible faults
        self._posts = 0
        self._ended = 0
        self._held: list[tuple[float, Event]] = []

    def probe(self, config: Any) -> Probe:  # type: ignore[override]  # asks the instance
        return self.inner.probe(config)

    def capabilities(self, config: Any) -> Capabilities:  # type: ignore[override]
        return self.inner.capabilities(config)

    def open(self, name: str, config: Any) -> None:
        self.inner.open(name, config)

    def register(self, region: RegionSpec) -> None:
        self.inner.register(region)

    def deregister(self, region_id: int) -> None:
        self.inner.deregister(region_id)

    def export(self) -> bytes:
        return self.inner.export()

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self.inner.import_peer(peer_id, body)

    def drop_peer(self, peer_id: int) -> None:
        self.inner.drop_peer(peer_id)

    def post(
        self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None
    ) -> None:
        self._posts += 1
        if self._posts == self._faults.get("fail_post"):
            raise TransferFailedError("injected: this post fails")
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def cancel(self, ticket: int) -> None:
        self.inner.cancel(ticket)

    def poll(self) -> Sequence[Event]:
        now = time.monotonic()
        due = now + float(self._faults.get("hold_completions_s", 0.0))
        for event in self.inner.poll():
            if isinstance(event, Completion):
                self._held += [(due, changed) for changed in self._change(event)]
            else:
                self._held.append((now, event))
        if self._faults.get("reorder"):
            # Some wait for the next call, so that even single ones change places.
            due_now = [entry for entry in self._held if self._random.random() < 0.5]
            self._random.shuffle(due_now)
        else:
            due_now = [entry for entry in self._held if entry[0] <= now]
        for entry in due_now:
            self._held.remove(entry)
        return [event for _, event in due_now]

    def _change(self, event: Completion) -> list[Completion]:
        self._ended += 1
        if self._faults.get("lose_completions"):
            return []
        if self._ended == self._faults.get("fail_completion"):
            failed = TransferFailedError("injected: this part fails")
            return [Completion(event.ticket, failed)]
        return [event, event] if self._faults.get("double_completions") else [event]

    def close(self) -> None:
        self._held.clear()
        self.inner.close()

    def counters(self) -> Mapping[str, int]:
        return self.inner.counters()


def faulty(inner: Backend, faults: Mapping[str, Any]) -> Backend:
    """Wrap ``inner``.

    ``hold_completions_s`` delays them, ``lose_completions`` drops all,
    ``double_completions`` reports each twice, ``reorder`` shuffles with ``seed``,
    ``fail_post`` and ``fail_completion`` make the n-th one fail.
    """
    return FaultyLayer(inner, faults)
