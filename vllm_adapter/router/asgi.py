"""The few ASGI pieces the router needs: read a body, send an answer, notice a leaver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvtransport_vllm.router.answer import Answer, Headers
from kvtransport_vllm.router.errors import RequestRefusedError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGoneError(ConnectionError):
    """The client closed its connection; there is nobody to answer."""


def request_headers(scope: Scope, limit: int) -> dict[str, str]:
    """Headers by lower-case name; of a repeated one the first counts everywhere.

    Raises RequestRefusedError (431) when they are larger than ``limit`` bytes.
    """
    raw: Headers = scope["headers"]
    size = sum(len(name) + len(value) + 4 for name, value in raw)
    if size > limit:
        raise RequestRefusedError(
            431, f"the request has {size} bytes of headers; the limit is {limit}"
        )
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


async def read_body(receive: Receive, *, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises RequestRefusedError (413 over ``limit`` bytes, 408 after
    ``timeout_s``) and ClientGoneError.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part: bytes = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise RequestRefusedError(
                        413,
                        f"the request body is larger than {limit} bytes (--limit max-body-bytes)",
                    )
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise RequestRefusedError(
            408, f"the request body did not arrive within {timeout_s:g} s"
        ) from error


async def send_answer(send: Send, answer: Answer) -> None:
    """Send a complete answer."""
    length = (b"content-length", b"%d" % len(answer.body))
    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [*answer.headers, length],
        }
    )
    await send({"type": "http.response.body", "body": answer.body})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection.  Follows ``read_body``."""
    while (await receive())["type"] != "http.disconnect":
        pass
