"""A complete answer to a client, and the OpenAI form of an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status, headers (without ``content-length``) and the whole body."""

    status: int
    body: bytes
    headers: Headers = field(default_factory=list)


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """The JSON that OpenAI clients turn into an exception."""
    return msgspec.json.encode(
        {
            "error": {
                "message": message,
                "type": HTTPStatus(status).phrase.replace(" ", "") + "Error",
                "param": param,
                "code": status,
            }
        }
    )


def json_answer(status: int, body: bytes, headers: Headers | None = None) -> Answer:
    """An answer whose body is JSON already."""
    return Answer(
        status=status,
        body=body,
        headers=[(b"content-type", b"application/json"), *(headers or [])],
    )


def error_answer(status: int, message: str, *, param: str | None = None) -> Answer:
    """An error answer; 503 tells the client when to come back."""
    retry = [(b"retry-after", b"1")] if status == HTTPStatus.SERVICE_UNAVAILABLE else []
    return json_answer(status, error_body(status, message, param=param), retry)
