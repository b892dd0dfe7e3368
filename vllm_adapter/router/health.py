"""Active probes: one task per engine, hurried by what the legs find out.

An up engine is asked for ``/health`` at a steady interval.  One that is not up
is asked again after a pause that doubles from a tenth of a second to fifteen
seconds, so a dead engine sees few connections and a restarted one is back soon.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

from kvtransport_vllm.router.config import Limits
from kvtransport_vllm.router.engines import Engine, State
from kvtransport_vllm.router.errors import EngineError, EngineUnreachableError
from kvtransport_vllm.router.upstream import Upstream

logger = logging.getLogger("kvtransport.router.health")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0
# A busy API server may miss a probe; three in a row is no accident.
_MISSES_UNTIL_DOWN = 3


class Prober:
    """Keeps the engines' states true.  ``run`` ends only by cancellation."""

    def __init__(self, engines: Iterable[Engine], upstream: Upstream, limits: Limits) -> None:
        self._engines = tuple(engines)
        self._upstream = upstream
        self._limits = limits
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe every engine once, then keep probing in the background."""
        await asyncio.gather(*(self._probe(engine, _MISSES_UNTIL_DOWN) for engine in self._engines))
        for engine in self._engines:
            if engine.state is not State.UP:
                logger.warning("%s engine %s is not up yet", engine.role, engine.name)
        self._tasks = [asyncio.create_task(self._watch(engine)) for engine in self._engines]

    async def stop(self) -> None:
        """End the background probes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        misses = 0
        while True:
            await self._pause(engine, misses)
            alive = await self._probe(engine, misses + 1)
            misses = 0 if alive else misses + 1

    async def _pause(self, engine: Engine, misses: int) -> None:
        if engine.state is State.UP:
            pause = self._limits.probe_interval_s * random.uniform(0.9, 1.1)  # noqa: S311
        else:
            # No wake-up here: the backoff is what protects a dead engine.
            engine.wake.clear()
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2.0**misses, _LONGEST_PAUSE_S))
            return
        engine.wake.clear()
        try:
            async with asyncio.timeout(pause):
                await engine.wake.wait()
        except TimeoutError:
            return

    async def _probe(self, engine: Engine, misses: int) -> bool:
        try:
            answer = await self._upstream.fetch(
                engine, "/health", timeout_s=self._limits.probe_timeout_s
            )
        except EngineError as error:
            refused = isinstance(error, EngineUnreachableError) and error.refused
            silent = misses >= _MISSES_UNTIL_DOWN and not refused
            state = State.DOWN if refused or silent else State.SUSPECT
            engine.mark(state, str(error), abort=silent)
            return False
        if answer.status == 200:
            engine.probed()
            return True
        engine.mark(State.DOWN, f"/health answered {answer.status}")
        return False
