"""What both legs share: headers, judging an engine by its answer, counting."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator

from kvtransport_vllm.router.answer import Answer
from kvtransport_vllm.router.engines import Engine, Pool, State
from kvtransport_vllm.router.errors import (
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineSilentError,
    EngineUnreachableError,
)
from kvtransport_vllm.router.metrics import Metrics
from kvtransport_vllm.router.turn import DP_RANK, Turn

logger = logging.getLogger("kvtransport.router.legs")

# "Not now" rather than "not this request": another engine may accept it.
_TRY_ELSEWHERE = frozenset((408, 425, 429))


def engine_headers(turn: Turn, engine: Engine) -> dict[str, str]:
    """The turn's headers; an engine that stands for one DP rank gets that rank."""
    if engine.spec.dp_rank is None:
        return turn.headers
    return {**turn.headers, DP_RANK: str(engine.spec.dp_rank)}


def is_refusal(status: int) -> bool:
    """True when the engine says that the request itself is wrong."""
    return 400 <= status < 500 and status not in _TRY_ELSEWHERE


def fault(engine: Engine, answer: Answer) -> EngineFaultError:
    """The error for an answer that is neither success nor refusal.

    A redirect is one too: only configured addresses are contacted.
    """
    relayed = answer if answer.status >= 400 else None
    return EngineFaultError(
        f"{engine.name} answered {answer.status}: {answer.body[:200]!r}",
        engine=engine.name,
        answer=relayed,
    )


@contextlib.contextmanager
def judged(engine: Engine, turn: Turn, metrics: Metrics) -> Iterator[None]:
    """Let what happens inside change the engine's state; counts and logs failures."""
    try:
        yield
    except EngineError as error:
        metrics.legs.labels(engine.role, engine.name, error.outcome).inc()
        logger.warning(
            "leg failed: leg=%s engine=%s outcome=%s request=%s: %s",
            engine.role,
            engine.name,
            error.outcome,
            turn.id,
            error,
        )
        engine.failed(_state_after(error), str(error))
        raise
    except BaseException:
        # The client left, or the router stops: not the engine's fault.
        metrics.legs.labels(engine.role, engine.name, "cancelled").inc()
        raise


def _state_after(error: EngineError) -> State:
    if isinstance(error, EngineUnreachableError):
        return State.DOWN
    if isinstance(error, (EngineLostError, EngineSilentError)):
        return State.SUSPECT
    return State.UP


def another(pool: Pool, tried: Collection[Engine], error: EngineError) -> Engine | None:
    """The next engine to try after ``error``, or None.

    A connection that broke may only have been a stale one, so when nobody else
    is left the same engine gets a second chance.
    """
    chosen = pool.pick(exclude=tried)
    if chosen is None and isinstance(error, EngineLostError):
        chosen = pool.pick()
    return chosen
