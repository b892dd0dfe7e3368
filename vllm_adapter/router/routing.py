"""Where a turn goes: affinity first, load second, dead engines never."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvtransport_vllm.router.affinity import Binding, Store
from kvtransport_vllm.router.engines import Engine, Pool
from kvtransport_vllm.router.metrics import Metrics
from kvtransport_vllm.router.turn import Turn


@dataclass(frozen=True, slots=True)
class Held:
    """The engines that served this conversation last; ``skew`` as in ``Pool.pick``."""

    decode: Engine | None = None
    prefill: Engine | None = None
    skew: float = 0.0


class Routing:
    """The two pools and the bindings between conversations and engines."""

    def __init__(self, prefills: Pool, decodes: Pool, store: Store, metrics: Metrics) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.store = store
        self._metrics = metrics

    async def find(self, turn: Turn) -> Held:
        """Who served this conversation; voids bindings to engines that went down since."""
        bindings = await self.store.get([candidate.key for candidate in turn.candidates])
        for candidate, binding in zip(turn.candidates, bindings, strict=True):
            if binding is None:
                continue
            decode = _alive(self.decodes, binding.decode, binding)
            if decode is None:
                self._metrics.affinity.labels(candidate.label, "void").inc()
                # An engine that only other replicas know is none of our business.
                if self.decodes.get(binding.decode) is not None:
                    self.store.drop(candidate.key)
                continue
            self._metrics.affinity.labels(candidate.label, "hit").inc()
            prefill = _alive(self.prefills, binding.prefill, binding)
            return Held(decode, prefill, candidate.skew)
        self._metrics.affinity.labels("none", "miss").inc()
        return Held()

    def bind(self, turn: Turn, decode: Engine, prefill: Engine | None) -> None:
        """Remember who served this turn.  Call it on success only."""
        name = "" if prefill is None else prefill.name
        if turn.binds:
            self.store.put(turn.binds, Binding(decode.name, name, time.time()))


def _alive(pool: Pool, name: str, binding: Binding) -> Engine | None:
    engine = pool.get(name)
    return None if engine is None or binding.bound_at <= engine.dropped_at else engine
