"""Leg 2: let a decode engine answer, and relay its bytes as they come.

Until the first byte of the answer another decode engine can take over unseen;
so nothing is sent to the client before it, not even the status.  vLLM sends a
stream's headers long before its first token, and holding those back costs the
client nothing.
"""

from __future__ import annotations

import time

import msgspec

from kvtransport_vllm.router.answer import json_answer
from kvtransport_vllm.router.body import decode_body
from kvtransport_vllm.router.client import Client
from kvtransport_vllm.router.config import RouterConfig
from kvtransport_vllm.router.engines import Engine, State
from kvtransport_vllm.router.errors import (
    EngineDeadlineError,
    EngineError,
    EngineFaultError,
    EngineLostError,
)
from kvtransport_vllm.router.legs import another, engine_headers, fault, is_refusal, judged
from kvtransport_vllm.router.metrics import Metrics
from kvtransport_vllm.router.prefill import Prefilled
from kvtransport_vllm.router.routing import Routing
from kvtransport_vllm.router.turn import Turn
from kvtransport_vllm.router.upstream import Leg, Upstream

_ERROR_EVENT = b'data: {"error"'
_END_OF_STREAM = b"data: [DONE]"


class DecodeLeg:
    """Runs leg 2 with failover.  Event loop only."""

    def __init__(
        self, config: RouterConfig, routing: Routing, upstream: Upstream, metrics: Metrics
    ) -> None:
        self._limits = config.limits
        self._routing = routing
        self._upstream = upstream
        self._metrics = metrics

    async def run(self, turn: Turn, engine: Engine, prefilled: Prefilled, client: Client) -> None:
        """Answer the client, starting with ``engine``.

        Raises EngineError when every attempt failed before the first byte;
        then nothing was sent.  A failure after it ends the client's stream
        with an error, it is never made to look complete.
        """
        body = decode_body(turn.fields, prefilled.params)
        pool = self._routing.decodes
        tried: set[Engine] = set()
        current: Engine | None = engine
        if engine.state is State.DOWN:
            current = pool.pick() or engine
        attempts = 0
        while True:
            assert current is not None, "the loop ends when there is nobody left to try"
            attempts += 1
            try:
                return await self._attempt(turn, current, body, prefilled, client)
            except EngineError as error:
                tried.add(current)
                current = another(pool, tried, error)
                last = current is None or attempts >= self._limits.max_attempts
                if last or client.started or isinstance(error, EngineDeadlineError):
                    raise
                self._metrics.failovers.labels("decode").inc()

    async def _attempt(
        self, turn: Turn, engine: Engine, body: bytes, prefilled: Prefilled, client: Client
    ) -> None:
        with judged(engine, turn, self._metrics), engine.busy():
            async with self._upstream.leg(engine) as leg:
                first = await self._first(turn, leg, body)
                if not 200 <= leg.status < 300:
                    await self._refused(turn, leg, first, client)
                    outcome = "refused"
                else:
                    self._routing.bind(turn, engine, prefilled.engine)
                    self._observe(turn)
                    await self._relay(leg, first, prefilled, client)
                    outcome = "ok"
        engine.served()
        self._metrics.legs.labels("decode", engine.name, outcome).inc()

    async def _first(self, turn: Turn, leg: Leg, body: bytes) -> bytes:
        """Send the request and wait for the first byte of the answer."""
        timeout_s = self._limits.first_byte_timeout_s
        began = time.monotonic()
        try:
            headers = engine_headers(turn, leg.engine)
            await leg.send("POST", turn.path, body, headers, timeout_s=timeout_s)
            first = await leg.chunk(timeout_s=timeout_s)
        finally:
            turn.waited_s += time.monotonic() - began
        ok = 200 <= leg.status < 300
        if not ok and not is_refusal(leg.status):
            answer = await leg.collect(timeout_s=timeout_s, first=first)
            raise fault(leg.engine, answer)
        if ok and not first:
            raise EngineFaultError(
                f"{leg.engine.name} answered {leg.status} without content", engine=leg.engine.name
            )
        if ok:
            _check_error_event(leg.engine, first)
        return first

    async def _refused(self, turn: Turn, leg: Leg, first: bytes, client: Client) -> None:
        answer = await leg.collect(timeout_s=self._limits.idle_timeout_s, first=first)
        self._observe(turn)
        await client.answer(answer, engine=leg.engine.name)

    async def _relay(self, leg: Leg, first: bytes, prefilled: Prefilled, client: Client) -> None:
        idle_s = self._limits.idle_timeout_s
        await client.start(leg.status, leg.headers, leg.engine.name, prefilled.report)
        await client.send(first)
        tail = first
        try:
            while chunk := await leg.chunk(timeout_s=idle_s):
                await client.send(chunk)
                tail = (tail + chunk)[-32:] if len(chunk) < 32 else chunk
            if client.is_event_stream and _END_OF_STREAM not in tail[-32:]:
                raise EngineLostError(
                    f"{leg.engine.name} ended the stream before it was complete",
                    engine=leg.engine.name,
                )
        except EngineError as error:
            await client.abort(error, tail)
            raise
        await client.finish()

    def _observe(self, turn: Turn) -> None:
        total = time.monotonic() - turn.received_s
        self._metrics.first_byte.observe(total)
        self._metrics.added_latency.observe(max(total - turn.waited_s, 0.0))


class _ErrorEvent(msgspec.Struct):
    class Detail(msgspec.Struct):
        code: int = 0

    error: Detail


_EVENT = msgspec.json.Decoder(_ErrorEvent)


def _check_error_event(engine: Engine, first: bytes) -> None:
    """Raise EngineFaultError when a stream begins with a server error.

    vLLM reports failures before the first token that way, with status 200.
    """
    if not first.startswith(_ERROR_EVENT):
        return
    event = first.split(b"\n", 1)[0].removeprefix(b"data: ")
    try:
        code = _EVENT.decode(event).error.code
    except msgspec.MsgspecError:
        return  # cut in the middle or of another shape: the client gets it as it is
    if code >= 500:
        raise EngineFaultError(
            f"{engine.name} began its stream with error {code}: {event[:200]!r}",
            engine=engine.name,
            answer=json_answer(code, event),
        )
