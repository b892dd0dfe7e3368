"""Which engines served a conversation: a bounded map from key to binding."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec


class Binding(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The engines of the last successful turn; ``bound_at`` is wall-clock seconds.

    Wall clock because bindings are shared between replicas and compared with
    the moment an engine went down; a skewed clock costs locality only.
    """

    decode: str
    prefill: str
    bound_at: float


class Store(Protocol):
    """Where bindings live.  Event loop only; nothing here raises or blocks for long."""

    async def get(self, keys: Sequence[bytes]) -> list[Binding | None]:
        """One binding or None per key."""

    def put(self, keys: Sequence[bytes], binding: Binding) -> None:
        """Bind every key; may reach a shared store a little later."""

    def drop(self, key: bytes) -> None:
        """Forget one key."""

    async def start(self) -> None:
        """Begin background work."""

    async def close(self) -> None:
        """End background work."""

    def __len__(self) -> int:
        """Bindings held in this process."""


class MemoryStore:
    """Bindings in this process: at most ``entries``, none older than ``ttl_s``.

    Every turn binds again, so the order of insertion is the order of age and
    the oldest is always first.
    """

    def __init__(self, *, entries: int, ttl_s: float) -> None:
        self._entries = entries
        self._ttl_s = ttl_s
        self._bindings: OrderedDict[bytes, Binding] = OrderedDict()

    async def get(self, keys: Sequence[bytes]) -> list[Binding | None]:
        return self.peek(keys)

    def peek(self, keys: Sequence[bytes]) -> list[Binding | None]:
        """What ``get`` answers, without waiting."""
        oldest = time.time() - self._ttl_s
        found = (self._bindings.get(key) for key in keys)
        return [None if b is None or b.bound_at < oldest else b for b in found]

    def put(self, keys: Sequence[bytes], binding: Binding) -> None:
        for key in keys:
            self._bindings[key] = binding
            self._bindings.move_to_end(key)
        self._trim()

    def drop(self, key: bytes) -> None:
        self._bindings.pop(key, None)

    async def start(self) -> None:
        return

    async def close(self) -> None:
        self._bindings.clear()

    def __len__(self) -> int:
        return len(self._bindings)

    def _trim(self) -> None:
        oldest = time.time() - self._ttl_s
        while self._bindings:
            key, binding = next(iter(self._bindings.items()))
            if len(self._bindings) <= self._entries and binding.bound_at >= oldest:
                return
            del self._bindings[key]
