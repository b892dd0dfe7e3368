"""The client's end of one request: headers that name what happened, bytes, errors."""

from __future__ import annotations

import asyncio

from kvtransport_vllm.router.answer import Answer, Headers, error_body
from kvtransport_vllm.router.asgi import ClientGoneError, Send, send_answer
from kvtransport_vllm.router.errors import EngineError

# The router says these itself; whatever an engine puts there is not relayed.
_OURS = frozenset((b"x-request-id", b"x-kvt-decode", b"x-kvt-prefill"))


class Client:
    """Sends one response.  ``started`` is true once the status is out."""

    def __init__(self, send: Send, request_id: str, *, timeout_s: float) -> None:
        self.started = False
        self.is_event_stream = False
        self.status = 0
        self._raw_send = send
        self.request_id = request_id
        self._timeout_s = timeout_s

    async def start(self, status: int, headers: Headers, engine: str, report: bytes) -> None:
        """Send status and headers.  Raises ClientGoneError."""
        own: Headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"x-kvt-decode", engine.encode()),
        ]
        if report:
            own.append((b"x-kvt-prefill", report))
        kept = [item for item in headers if item[0] not in _OURS]
        self.is_event_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in kept
        )
        self.started = True
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*kept, *own]}
        )

    async def send(self, chunk: bytes) -> None:
        """Send bytes of the body.  Raises ClientGoneError, also when it reads nothing."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        """The body is complete."""
        await self._send({"type": "http.response.body", "body": b""})

    async def abort(self, error: EngineError, tail: bytes) -> None:
        """Say that the answer is broken; the response stays incomplete on purpose.

        An event stream gets an error event.  The connection is then closed
        without the end-of-body mark, so that no client can take what it has
        for the whole answer.
        """
        if not self.is_event_stream:
            return
        gap = b"" if tail.endswith(b"\n\n") else b"\n\n"
        text = error_body(502, f"the decode engine failed during its answer ({error.outcome})")
        await self.send(gap + b"data: " + text + b"\n\n")

    async def answer(self, answer: Answer, *, engine: str = "") -> None:
        """Send a complete answer.  Raises ClientGoneError."""
        own: Headers = [(b"x-request-id", self.request_id.encode())]
        if engine:
            own.append((b"x-kvt-decode", engine.encode()))
        kept = [item for item in answer.headers if item[0] not in _OURS]
        self.started = True
        self.status = answer.status
        await send_answer(
            self._send, Answer(status=answer.status, body=answer.body, headers=[*kept, *own])
        )

    async def _send(self, message: object) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._raw_send(message)  # type: ignore[arg-type]
        except OSError as error:
            # TimeoutError is one: a client that stops reading is as good as gone.
            raise ClientGoneError(str(error)) from error
