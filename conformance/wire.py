"""JSON lines between controller, worker and peers.

A process speaks over duplicates of its standard input and output that it made
before any backend was imported; descriptor 1 then points at standard error.  A
backend that prints therefore fills a log and never reaches the protocol.  The
scheme needs nothing but pipes, so it works through ``ip netns exec`` and ssh.
"""

from __future__ import annotations

import base64
import json
import os
import select
import time
from typing import Any

MAX_LINE = 64 << 20
"""A line longer than this ends the conversation; the largest real one is a dump."""

_BYTES = "$bytes"


class ChannelClosedError(Exception):
    """The other end is gone or no longer speaks the protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """One message as a line; ``bytes`` values are carried as base64."""
    return json.dumps(message, default=_wrap, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Parse one line; raises ``ValueError`` when it is not a JSON object."""
    message = json.loads(line, object_hook=_unwrap)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {type(message).__name__}")  # noqa: TRY004
    return message


def _wrap(value: object) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {_BYTES: base64.b64encode(value).decode()}
    if hasattr(value, "item"):  # numpy scalars
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _unwrap(value: dict[str, Any]) -> Any:
    if len(value) == 1 and _BYTES in value:
        return base64.b64decode(value[_BYTES])
    return value


class Channel:
    """Blocking line channel over two descriptors; one thread at a time.

    ``receive`` raises ``ChannelClosedError`` at end of file and ``TimeoutError``
    after ``timeout_s``; a partial line is kept for the next call.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._buffer = bytearray()

    @classmethod
    def claim_stdio(cls) -> Channel:
        """Take over standard input and output; later prints go to standard error."""
        read_fd, write_fd = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        return cls(read_fd, write_fd)

    def fileno(self) -> int:
        return self._read_fd

    def send(self, message: dict[str, Any]) -> None:
        data = memoryview(encode(message))
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def pending(self) -> bool:
        """Return whether a whole line has already been read."""
        return b"\n" in self._buffer

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = bytearray(rest)
                return decode(bytes(line))
            self._fill(deadline)

    def _fill(self, deadline: float | None) -> None:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._read_fd], [], [], wait)
        if not ready:
            raise TimeoutError("no message by the deadline")
        data = os.read(self._read_fd, 1 << 20)
        if not data or len(self._buffer) + len(data) > MAX_LINE:
            raise ChannelClosedError("end of file" if not data else "line too long")
        self._buffer += data
