"""The engines, their state, and the choice among them.

An engine is *up* (takes traffic), *suspect* (takes traffic only when nothing
else is up) or *down* (takes none until a probe succeeds).  ``dropped_at`` says
when it last went down; affinity from before that moment is void, because what
it retained is gone.

Probes alone do not tell: an engine can answer ``/health`` and fail every
generation, and because it fails fast it would be the least loaded of all.  So
three failed legs in a row make an engine suspect for a while, probes or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from kvtransport_vllm.router.config import EngineSpec, Role

_FAILURES_UNTIL_HELD = 3
_LONGEST_HOLD_S = 30.0

logger = logging.getLogger("kvtransport.router.engines")


class State(enum.IntEnum):
    """Ordered by preference: higher is better."""

    DOWN = 0
    SUSPECT = 1
    UP = 2


class Abortable(Protocol):
    """A leg under way."""

    def abort(self) -> None:
        """End it now with an :class:`EngineSilentError`."""


class Engine:
    """One engine, its state and the legs it is serving."""

    def __init__(self, spec: EngineSpec, role: Role) -> None:
        self.spec = spec
        self.name = spec.name
        self.role = role
        self.state = State.DOWN
        self.dropped_at = 0.0
        self.in_flight = 0
        self.last_picked = 0
        self.legs: set[Abortable] = set()
        self.wake = asyncio.Event()
        self._failures = 0
        self._held_until = 0.0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count one request in flight for as long as the context lasts."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def probed(self) -> None:
        """A probe succeeded; the engine is up unless its legs keep failing."""
        if self.state is State.UP or time.monotonic() < self._held_until:
            return
        logger.info("%s engine %s is up", self.role, self.name)
        self.state = State.UP

    def served(self) -> None:
        """A leg succeeded."""
        self._failures = 0
        self._held_until = 0.0

    def failed(self, state: State, why: str) -> None:
        """A leg failed: at most ``state`` from now on, until a probe says better."""
        self._failures += 1
        beyond = self._failures - _FAILURES_UNTIL_HELD
        if beyond >= 0:
            hold = min(2.0 ** min(beyond, 10), _LONGEST_HOLD_S)
            self._held_until = time.monotonic() + hold
            state = min(state, State.SUSPECT)
        self.mark(state, why)

    def mark(self, state: State, why: str, *, abort: bool = False) -> None:
        """Lower the state; logs the change and wakes the prober.

        ``abort`` ends the legs under way.  An engine that shuts down refuses
        connections while it finishes what it has, and a dead one's kernel
        closes its connections: only silence needs it.
        """
        if state < self.state:
            logger.warning("%s engine %s is %s: %s", self.role, self.name, state.name.lower(), why)
            self.state = state
        self.wake.set()
        if state is State.DOWN:
            # Wall clock, because other replicas' bindings carry theirs.
            self.dropped_at = time.time()
        if abort:
            for leg in list(self.legs):
                leg.abort()


class Pool:
    """All engines of one role."""

    def __init__(self, role: Role, specs: Iterable[EngineSpec]) -> None:
        self.role = role
        self.engines = tuple(Engine(spec, role) for spec in specs)
        self._by_name = {engine.name: engine for engine in self.engines}
        self._picks = 0

    def get(self, name: str) -> Engine | None:
        """The engine of that name, or None when the configuration has none."""
        return self._by_name.get(name)

    @property
    def any_up(self) -> bool:
        """True when a request could be served."""
        return any(engine.state is not State.DOWN for engine in self.engines)

    def pick(
        self,
        *,
        prefer: Engine | None = None,
        skew: float = 0,
        exclude: Collection[Engine] = (),
    ) -> Engine | None:
        """The least loaded engine of the best state, or None when all are down.

        ``prefer`` wins as long as it is up and has at most ``skew`` requests
        more in flight than the least loaded; with the default it only wins ties.
        """
        usable = [e for e in self.engines if e.state is not State.DOWN and e not in exclude]
        if not usable:
            return None
        best = max(engine.state for engine in usable)
        ready = [engine for engine in usable if engine.state is best]
        least = min(engine.in_flight for engine in ready)
        if prefer in ready and prefer.in_flight <= least + skew:
            chosen = prefer
        else:
            tied = [engine for engine in ready if engine.in_flight == least]
            chosen = min(tied, key=lambda engine: engine.last_picked)
        self._picks += 1
        chosen.last_picked = self._picks
        return chosen
