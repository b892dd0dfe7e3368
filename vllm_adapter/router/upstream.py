"""HTTP towards the engines.

``Upstream`` owns the connections, ``Leg`` is one request on one of them.  Every
wait has a deadline, and whatever the client library raises leaves here as one
of the :class:`EngineError` situations.  Redirects are never followed: only
configured addresses are contacted.
"""

from __future__ import annotations

import asyncio
import errno
import io
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from kvtransport_vllm.router.answer import Answer, Headers
from kvtransport_vllm.router.config import Limits
from kvtransport_vllm.router.engines import Engine
from kvtransport_vllm.router.errors import (
    EngineDeadlineError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineSilentError,
    EngineUnreachableError,
)

# vLLM closes idle connections after 5 s; reusing one at that very moment fails.
_KEEP_IDLE_S = 3.0
_LARGE_BODY = 512 << 10
_MAX_ANSWER = 64 << 20
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"date",
        b"server",
    )
)


class Upstream:
    """The connection pool to all engines.  Create and close it on the event loop."""

    def __init__(self, limits: Limits) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        self._urls: dict[tuple[str, str], URL] = {}

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def leg(self, engine: Engine) -> Leg:
        """A leg to that engine; use it as an async context manager."""
        return Leg(engine, self)

    async def request(
        self, method: str, engine: Engine, path: str, body: bytes | None, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Send one request; returns when the response's headers are here."""
        key = (engine.spec.url, path)
        url = self._urls.get(key)
        if url is None:
            url = self._urls[key] = URL(engine.spec.url + path, encoded=True)
        data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body
        return await self._session.request(
            method, url, data=data, headers=headers, allow_redirects=False
        )

    async def fetch(
        self,
        engine: Engine,
        path: str,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """GET a small document.  Raises EngineError."""
        async with self.leg(engine) as leg:
            await leg.send("GET", path, None, headers or {}, timeout_s=timeout_s)
            return await leg.collect(timeout_s=timeout_s)


class Leg:
    """One request to one engine.

    Leaving the context closes the connection unless the answer was read to its
    end; closing early is how an engine learns that nobody waits any more.
    """

    def __init__(self, engine: Engine, upstream: Upstream) -> None:
        self.engine = engine
        self.status = 0
        self.headers: Headers = []
        self._upstream = upstream
        self._response: aiohttp.ClientResponse | None = None
        self._timer: asyncio.Timeout | None = None
        self._aborted = False

    async def __aenter__(self) -> Self:
        self.engine.legs.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.legs.discard(self)
        if self._response is not None:
            self._response.close()

    def abort(self) -> None:
        """End the wait under way, and any later one, with EngineSilentError."""
        self._aborted = True
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(0)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        timeout_s: float,
    ) -> None:
        """Send the request and wait for status and headers.  Raises EngineError."""
        try:
            async with asyncio.timeout(self._allowed(timeout_s)) as self._timer:
                self._response = await self._upstream.request(
                    method, self.engine, path, body, headers
                )
        except (aiohttp.ClientError, OSError) as error:
            raise self._translated(error, timeout_s) from error
        finally:
            self._timer = None
        self.status = self._response.status
        self.headers = [
            (name.lower(), value)
            for name, value in self._response.raw_headers
            if name.lower() not in _HOP_BY_HOP
        ]

    async def chunk(self, *, timeout_s: float) -> bytes:
        """The next bytes as they arrive; empty at the end.  Raises EngineError."""
        assert self._response is not None, "chunk() follows send()"
        try:
            async with asyncio.timeout(self._allowed(timeout_s)) as self._timer:
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._translated(error, timeout_s) from error
        finally:
            self._timer = None

    async def collect(self, *, timeout_s: float, first: bytes = b"") -> Answer:
        """The rest of the answer.  Raises EngineError, also when it is far too long."""
        parts = [first]
        size = len(first)
        while part := await self.chunk(timeout_s=timeout_s):
            parts.append(part)
            size += len(part)
            if size > _MAX_ANSWER:
                raise EngineFaultError(
                    f"{self.engine.name} answered more than {_MAX_ANSWER} bytes",
                    engine=self.engine.name,
                )
        headers = [item for item in self.headers if item[0] != b"content-length"]
        return Answer(status=self.status, body=b"".join(parts), headers=headers)

    def _allowed(self, timeout_s: float) -> float:
        return 0 if self._aborted else timeout_s

    def _translated(self, error: Exception, timeout_s: float) -> EngineError:
        name = self.engine.name
        if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
            cause = getattr(error, "os_error", None)
            return EngineUnreachableError(
                f"{name} cannot be reached: {error}",
                engine=name,
                refused=getattr(cause, "errno", None) == errno.ECONNREFUSED,
            )
        if self._aborted:
            return EngineSilentError(f"{name} stopped answering its probes", engine=name)
        if isinstance(error, TimeoutError):
            return EngineDeadlineError(f"{name} said nothing for {timeout_s:g} s", engine=name)
        if isinstance(error, aiohttp.ClientResponseError):
            return EngineFaultError(f"{name} sent malformed HTTP: {error}", engine=name)
        return EngineLostError(f"{name} closed the connection: {error!r}", engine=name)
