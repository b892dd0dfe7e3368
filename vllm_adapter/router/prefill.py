"""Leg 1: let a prefill engine compute the prompt and keep its KV for a reader."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec

from kvtransport_vllm.router.answer import Answer
from kvtransport_vllm.router.body import is_null, needs_own_prefill, prefill_body
from kvtransport_vllm.router.config import RouterConfig
from kvtransport_vllm.router.engines import Engine
from kvtransport_vllm.router.errors import (
    EngineDeadlineError,
    EngineError,
    EngineFaultError,
    RequestRefusedError,
)
from kvtransport_vllm.router.legs import another, engine_headers, fault, is_refusal, judged
from kvtransport_vllm.router.metrics import Metrics
from kvtransport_vllm.router.routing import Held, Routing
from kvtransport_vllm.router.turn import Turn
from kvtransport_vllm.router.upstream import Upstream

logger = logging.getLogger("kvtransport.router.prefill")

# Sent as a header, so it has to stay small.
_MAX_REPORT = 4096


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What leg 1 achieved: nothing at all, or parameters for leg 2 and a report."""

    engine: Engine | None = None
    params: msgspec.Raw | None = None
    report: bytes = b""


_NULL = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    kvt_turn: msgspec.Raw = _NULL


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL


_REPLY = msgspec.json.Decoder(_Reply)
_PARAMS = msgspec.json.Decoder(_Params)
_OBJECT = msgspec.json.Decoder(dict[str, object])


class PrefillLeg:
    """Runs leg 1 with failover.  Event loop only."""

    def __init__(
        self, config: RouterConfig, routing: Routing, upstream: Upstream, metrics: Metrics
    ) -> None:
        self._config = config
        self._routing = routing
        self._upstream = upstream
        self._metrics = metrics

    async def run(self, turn: Turn, held: Held) -> Prefilled | Answer:
        """The parameters for leg 2, or a prefill engine's refusal to be relayed.

        When no prefill engine could do it the result is empty and the decode
        engine computes the prompt; with ``on_prefill_failure="error"`` that is
        a RequestRefusedError (502 or 503) instead.
        """
        reason = needs_own_prefill(turn.fields)
        if reason is not None:
            self._metrics.prefill_skipped.labels(reason).inc()
            return Prefilled()
        body = prefill_body(turn.fields, chat=turn.chat, params=_ask(turn, held))
        pool = self._routing.prefills
        engine = pool.pick(prefer=held.prefill, skew=self._config.max_skew)
        tried: set[Engine] = set()
        failure: EngineError | None = None
        while engine is not None and len(tried) < self._config.limits.max_attempts:
            if failure is not None:
                self._metrics.failovers.labels("prefill").inc()
            try:
                return await self._attempt(turn, engine, body)
            except EngineError as error:
                failure = error
                done = engine in tried or isinstance(error, EngineDeadlineError)
                tried.add(engine)
                engine = None if done else another(pool, tried, error)
        return self._without(failure)

    def _without(self, failure: EngineError | None) -> Prefilled:
        if self._config.on_prefill_failure == "error":
            status, why = (503, "is up") if failure is None else (502, "could answer")
            raise RequestRefusedError(status, f"no prefill engine {why}; try again later")
        self._metrics.prefill_skipped.labels("down" if failure is None else "failed").inc()
        return Prefilled()

    async def _attempt(self, turn: Turn, engine: Engine, body: bytes) -> Prefilled | Answer:
        timeout_s = self._config.limits.prefill_timeout_s
        began = time.monotonic()
        try:
            with judged(engine, turn, self._metrics), engine.busy():
                async with self._upstream.leg(engine) as leg:
                    headers = engine_headers(turn, engine)
                    await leg.send("POST", turn.path, body, headers, timeout_s=timeout_s)
                    answer = await leg.collect(timeout_s=timeout_s)
                if answer.status != 200 and not is_refusal(answer.status):
                    raise fault(engine, answer)
                result = answer if answer.status != 200 else _read(engine, answer)
        finally:
            elapsed = time.monotonic() - began
            turn.waited_s += elapsed
        engine.served()
        if isinstance(result, Answer):
            self._metrics.legs.labels("prefill", engine.name, "refused").inc()
            return result
        self._metrics.legs.labels("prefill", engine.name, "ok").inc()
        self._metrics.prefill_seconds.observe(elapsed)
        if result.params is None:
            self._metrics.prefill_skipped.labels("no_params").inc()
        return result


def _ask(turn: Turn, held: Held) -> dict[str, object]:
    params: dict[str, object] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    if held.decode is not None and held.decode.spec.named:
        params["kvt_ask"] = [held.decode.name]
    if turn.conversation:
        params["kvt_conversation"] = turn.conversation
    if not turn.reuse:
        params["kvt_reuse"] = False
    return params


def _read(engine: Engine, answer: Answer) -> Prefilled:
    try:
        params = _REPLY.decode(answer.body).kv_transfer_params
        if is_null(params):
            # No connector there, or nothing worth keeping; the prompt is lost work.
            logger.debug("%s returned no kv_transfer_params", engine.name)
            return Prefilled(engine)
        return Prefilled(engine, params, _report(_PARAMS.decode(params).kvt_turn))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineFaultError(
            f"{engine.name} answered 200 with a body that is no completion: {error}",
            engine=engine.name,
        ) from error


def _report(raw: msgspec.Raw) -> bytes:
    if is_null(raw):
        return b""
    # Decoded and encoded again: one line, and only what fits a header.
    text = msgspec.json.encode(_OBJECT.decode(raw))
    return text if len(text) <= _MAX_REPORT and text.isascii() else b""
