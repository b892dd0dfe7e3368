"""One streamed chat request through the router, with its time to first token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from conversation import Message


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and what the prefill engine says about its part.

    ``ttft_s`` and ``total_s`` are seconds from sending the request, as the
    client sees them.  ``prefill`` holds token counts by where their KV came
    from: ``prompt_tokens``, ``local_tokens``, ``pulled_tokens``,
    ``recomputed_tokens``; and ``outcome``.
    """

    text: str
    ttft_s: float
    total_s: float
    prefill: dict[str, Any] = field(default_factory=dict)

    def tokens(self, kind: str) -> int:
        """A count of ``prefill``; 0 when the engine did not tell."""
        return int(self.prefill.get(f"{kind}_tokens", 0))


class Chat:
    """A client of the router; each ``conversation`` keeps its KV to itself."""

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        """Close the connection to the router."""
        self._http.close()

    def ask(
        self, messages: list[Message], *, conversation: str, reuse: bool, max_tokens: int = 48
    ) -> Answer:
        """Ask for one greedy answer.

        ``reuse`` False tells the engines not to look for the conversation's KV
        elsewhere.  Raises ``httpx.HTTPError`` when the router refuses or breaks off.
        """
        body = {
            "model": "model",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "cache_salt": conversation,
        }
        headers = {"x-session-id": conversation}
        if not reuse:
            headers["x-kvt-reuse"] = "off"
        started = time.perf_counter()
        with self._http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.is_error:
                response.read()
                raise httpx.HTTPStatusError(
                    response.text, request=response.request, response=response
                )
            text, ttft_s = _read(response, started)
            prefill = json.loads(response.headers.get("x-kvt-prefill", "{}"))
        return Answer(text, ttft_s, time.perf_counter() - started, prefill)


def _read(response: httpx.Response, started: float) -> tuple[str, float]:
    """The streamed text and when its first piece arrived."""
    pieces: list[str] = []
    ttft_s = 0.0
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise httpx.RemoteProtocolError(str(event["error"]))
        piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
        if piece:
            ttft_s = ttft_s or time.perf_counter() - started
            pieces.append(piece)
    return "".join(pieces), ttft_s
