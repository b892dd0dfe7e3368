"""The ASGI application: paths, the course of one request, start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec

from kvtransport_vllm.router.affinity import MemoryStore, Store
from kvtransport_vllm.router.answer import Answer, error_answer, json_answer
from kvtransport_vllm.router.asgi import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    read_body,
    request_headers,
    until_gone,
)
from kvtransport_vllm.router.client import Client
from kvtransport_vllm.router.config import RouterConfig
from kvtransport_vllm.router.decode import DecodeLeg
from kvtransport_vllm.router.engines import Pool
from kvtransport_vllm.router.errors import EngineDeadlineError, EngineError, RequestRefusedError
from kvtransport_vllm.router.health import Prober
from kvtransport_vllm.router.identity import Keyring
from kvtransport_vllm.router.metrics import CONTENT_TYPE, Metrics
from kvtransport_vllm.router.prefill import PrefillLeg
from kvtransport_vllm.router.routing import Routing
from kvtransport_vllm.router.turn import CHAT, COMPLETIONS, TurnReader, request_id
from kvtransport_vllm.router.upstream import Upstream

logger = logging.getLogger("kvtransport.router")

_Page = Callable[[dict[str, str]], Awaitable[Answer]]


class Router:
    """One router; construct it on the event loop that serves it.

    It is the ASGI application itself.  ``start`` and ``stop`` run with the
    server's lifespan.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._limits = config.limits
        self.metrics = Metrics()
        prefills = Pool("prefill", config.prefills)
        decodes = Pool("decode", config.decodes)
        engines = (*prefills.engines, *decodes.engines)
        self._store = _store(config, self.metrics)
        self._routing = Routing(prefills, decodes, self._store, self.metrics)
        self._upstream = Upstream(config.limits)
        self._prober = Prober(engines, self._upstream, config.limits)
        self._reader = TurnReader(config, Keyring(config.secret), self.metrics)
        parts = (config, self._routing, self._upstream, self.metrics)
        self._prefill = PrefillLeg(*parts)
        self._decode = DecodeLeg(*parts)
        self._in_flight = 0
        self._pages: dict[str, _Page] = {
            "/health": self._health,
            "/metrics": self._metrics_page,
            "/v1/models": self._models,
        }
        self.metrics.watch(engines, lambda: self._in_flight, lambda: len(self._store))

    async def start(self) -> None:
        """Probe all engines once; returns whether or not any of them is up."""
        await self._store.start()
        await self._prober.start()

    async def stop(self) -> None:
        """End background work and close every connection."""
        await self._prober.stop()
        await self._upstream.close()
        await self._store.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        known = path in {CHAT, COMPLETIONS} or path in self._pages
        client = Client(send, "-", timeout_s=self._limits.idle_timeout_s)
        # The one that asks how many there are is none of them.
        counts = path not in self._pages
        self._in_flight += counts
        outcome = "gone"
        try:
            outcome = await self._answered(path, scope, receive, client)
        except ClientGoneError:
            logger.debug("client left: request=%s", client.request_id)
        finally:
            self._in_flight -= counts
            self.metrics.requests.labels(path if known else "other", outcome).inc()

    async def _answered(self, path: str, scope: Scope, receive: Receive, client: Client) -> str:
        """Answer one request, also when it fails; says how it ended."""
        try:
            headers = request_headers(scope, self._limits.max_header_bytes)
            client.request_id = request_id(headers)
            await self._dispatch(path, scope["method"], headers, receive, client)
        except RequestRefusedError as error:
            await client.answer(error_answer(error.status, str(error), param=error.param))
            return "refused"
        except EngineError as error:
            if client.started:
                return "aborted"
            await client.answer(error.answer or _failed(error))
            return "failed"
        return _outcome(client.status)

    async def _dispatch(
        self, path: str, method: str, headers: dict[str, str], receive: Receive, client: Client
    ) -> None:
        page = self._pages.get(path)
        if page is None and path not in {CHAT, COMPLETIONS}:
            known = ", ".join((CHAT, COMPLETIONS, *self._pages))
            raise RequestRefusedError(404, f"there is no {path[:200]} here; there are {known}")
        wanted = "POST" if page is None else "GET"
        if method != wanted:
            raise RequestRefusedError(405, f"{path} takes {wanted}, not {method}")
        if page is not None:
            await client.answer(await page(headers))
            return
        if self._in_flight > self._limits.max_in_flight:
            raise RequestRefusedError(
                503,
                f"{self._limits.max_in_flight} requests are under way (--limit max-in-flight); "
                "try again later",
            )
        limits = self._limits
        body = await read_body(
            receive, limit=limits.max_body_bytes, timeout_s=limits.request_timeout_s
        )
        await _unless_gone(receive, self._complete(path, headers, body, client))

    async def _complete(
        self, path: str, headers: dict[str, str], body: bytes, client: Client
    ) -> None:
        """One turn: find out whose it is, leg 1, leg 2."""
        turn = self._reader.read(path, headers, body, client.request_id)
        held = await self._routing.find(turn)
        decode = self._routing.decodes.pick(prefer=held.decode, skew=held.skew)
        if decode is None:
            raise RequestRefusedError(503, "no decode engine is up; try again later")
        with decode.busy():
            prefilled = await self._prefill.run(turn, held)
        if isinstance(prefilled, Answer):
            await client.answer(prefilled)
            return
        await self._decode.run(turn, decode, prefilled, client)

    async def _health(self, _headers: dict[str, str]) -> Answer:
        states = {
            pool.role: {engine.name: engine.state.name.lower() for engine in pool.engines}
            for pool in (self._routing.prefills, self._routing.decodes)
        }
        able = self._routing.decodes.any_up and (
            self._routing.prefills.any_up or self._config.on_prefill_failure == "decode"
        )
        status = HTTPStatus.OK if able else HTTPStatus.SERVICE_UNAVAILABLE
        return json_answer(
            status, msgspec.json.encode({"status": "ok" if able else "unavailable", **states})
        )

    async def _metrics_page(self, _headers: dict[str, str]) -> Answer:
        return Answer(
            status=200,
            body=self.metrics.render(),
            headers=[(b"content-type", CONTENT_TYPE.encode())],
        )

    async def _models(self, headers: dict[str, str]) -> Answer:
        engine = self._routing.decodes.pick()
        if engine is None:
            raise RequestRefusedError(503, "no decode engine is up; try again later")
        sent = {name: headers[name] for name in ("authorization",) if name in headers}
        return await self._upstream.fetch(
            engine, "/v1/models", timeout_s=self._limits.request_timeout_s, headers=sent
        )


async def _unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work, but stop it when the client leaves.  Raises ClientGoneError then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _store(config: RouterConfig, metrics: Metrics) -> Store:
    memory = MemoryStore(entries=config.affinity_entries, ttl_s=config.affinity_ttl_s)
    if not config.redis_url:
        return memory
    from kvtransport_vllm.router.redis_store import RedisStore

    return RedisStore(
        config.redis_url,
        timeout_s=config.redis_timeout_s,
        ttl_s=config.affinity_ttl_s,
        local=memory,
        on_error=lambda operation: metrics.store_errors.labels(operation).inc(),
    )


def _failed(error: EngineError) -> Answer:
    if isinstance(error, EngineDeadlineError):
        return error_answer(504, "the decode engine took too long to begin its answer")
    return error_answer(502, f"no decode engine could answer (the last one: {error.outcome})")


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "engine_error"
