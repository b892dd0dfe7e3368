"""Rung 4 of the fault ladder: a proxy between two agents that mutes, slows, cuts or corrupts.

A backend's exported bytes are opaque, but most of those that speak TCP name their
port in plain digits.  ``through`` puts another port of as many digits in its
place, so that the importing side dials the proxy.  Where that does not work the
checks that want a proxy say so; nothing else depends on it.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtransport import metadata
from kvtransport_conformance.listeners import is_loopback

_CHUNK = 65_536
_TICK_S = 0.05
_CUT_AFTER = 20
MODES = ("pass", "mute", "drop_ack", "slow", "truncate", "garbage")


class Detour:
    """Forwards connections to a listener on this host; ``mode`` may change at any time.

    ``pass`` forwards, ``mute`` swallows both directions, ``drop_ack`` swallows
    what the server answers, ``slow`` delays every chunk, ``truncate`` closes
    after twenty bytes of an answer, ``garbage`` inverts the first bytes of
    every connection's answers.
    """

    def __init__(self, target_port: int) -> None:
        self.mode = "pass"
        self.forwarded = 0
        self._target = ("127.0.0.1", target_port)
        self._listener = _listen_on_port_like(target_port)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="detour", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._listener], [], [], _TICK_S)[0]:
                continue
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(self._target, 2.0)
            except OSError:
                client.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(client, server), name="detour", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        """One connection; ends when either side does, or the mode says so."""
        answered = 0
        with client, server, contextlib.suppress(OSError):
            while not self._stop.is_set():
                for source in select.select([client, server], [], [], _TICK_S)[0]:
                    data = source.recv(_CHUNK)
                    if not data:
                        return
                    backward = source is server
                    changed = self._change(data, answered, backward=backward)
                    answered += len(data) if backward else 0
                    if changed is None:
                        return
                    self._send(client if backward else server, changed)

    def _change(self, data: bytes, answered: int, *, backward: bool) -> bytes | None:
        """What to forward instead of ``data``; None ends the connection."""
        if self.mode == "mute" or (self.mode == "drop_ack" and backward):
            return b""
        if self.mode == "slow":
            time.sleep(0.02)
        elif self.mode == "truncate" and backward:
            return data[: _CUT_AFTER - answered] if answered < _CUT_AFTER else None
        elif self.mode == "garbage" and backward and answered < _CUT_AFTER:
            return bytes(byte ^ 0xFF for byte in data)
        return data

    def _send(self, sink: socket.socket, data: bytes) -> None:
        sink.settimeout(10.0)
        sink.sendall(data)
        self.forwarded += len(data)

    def close(self) -> None:
        """End every connection and thread."""
        self._stop.set()
        for thread in self._threads:
            thread.join(15.0)
        self._listener.close()


def _listen_on_port_like(port: int) -> socket.socket:
    """Listen on another port with as many digits."""
    digits = len(str(port))
    low, high = max(1025, 10 ** (digits - 1)), min(65_535, 10**digits - 1)
    for _ in range(200):
        candidate = random.randint(low, high)  # noqa: S311  # a port, not a secret
        with contextlib.suppress(OSError):
            if candidate != port:
                return socket.create_server(("127.0.0.1", candidate))
    raise OSError(f"no free port with {digits} digits")


def through(blob: bytes, listeners: Sequence[Sequence[Any]]) -> tuple[Detour, bytes] | None:
    """Start a proxy for one of ``listeners`` and return it with rewritten metadata.

    None when no loopback TCP port stands in the backend's part of ``blob``.
    """
    header, raw = metadata.open_metadata(blob)
    body = metadata.decode_body(raw)
    for family, address, port in listeners:
        digits = str(port).encode()
        local = family in {"tcp", "tcp6"} and (is_loopback(address) or address in {"0.0.0.0", "::"})  # noqa: S104
        if not local or body.backend.count(digits) != 1:
            continue
        detour = Detour(port)
        rewritten = body.backend.replace(digits, str(detour.port).encode())
        changed = metadata.Body(body.capabilities, body.regions, rewritten)
        return detour, metadata.encode(header, changed)
    return None
