"""The few HTTP calls that a launcher makes to its own services on 127.0.0.1.

The standard library only, so that a launcher needs nothing installed, and no
proxy settings are looked at.
"""

from __future__ import annotations

import http.client
import json
from typing import Any


class HttpStatusError(OSError):
    """The service answered, but not with success; ``body`` is its answer's beginning."""

    def __init__(self, path: str, status: int, body: str) -> None:
        super().__init__(f"{path} answered {status}: {body}")
        self.status = status
        self.body = body


def request(
    port: int,
    method: str,
    path: str,
    *,
    body: object = None,
    headers: dict[str, str] | None = None,
    timeout_s: float,
) -> bytes:
    """Send one request and return the body of the answer.

    Raises ``HttpStatusError`` for an answer of 400 or more and ``OSError``
    (``TimeoutError`` and ``ConnectionError`` included) when there is none.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data else {}
        connection.request(method, path, body=data, headers=sent | (headers or {}))
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        msg = f"no HTTP answer from port {port}: {error!r}"
        raise ConnectionError(msg) from error
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise HttpStatusError(path, response.status, answer[:1000].decode(errors="replace"))
    return answer


def post_json(
    port: int,
    path: str,
    body: object,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> dict[str, Any]:
    """Post JSON, return the JSON object of the answer; errors as in ``request``."""
    answer = json.loads(
        request(port, "POST", path, body=body, headers=headers, timeout_s=timeout_s)
    )
    if not isinstance(answer, dict):
        raise HttpStatusError(path, 200, "the answer is no JSON object")
    return answer
