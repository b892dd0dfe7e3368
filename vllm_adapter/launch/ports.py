"""Ports for processes that are about to be started."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Distinct ports of loopback that nobody listens on now.

    They lie below those that the kernel gives to outgoing connections (see
    ip(7), ``ip_local_port_range``): an engine takes many seconds to start, and
    meanwhile others connect to one another all the time.  Another process may
    still take one before it is used: whoever starts the listener must treat
    "address in use" as a failed start.
    """
    with ExitStack() as stack:
        return [_free(stack) for _ in range(count)]


def _free(stack: ExitStack) -> int:
    """A port, held until ``stack`` is left, so that the next one is another."""
    for port in (*_candidates(), 0):
        held = stack.enter_context(socket.socket())
        with suppress(OSError):
            held.bind(("127.0.0.1", port))
            return int(held.getsockname()[1])
    raise OSError("no port of 127.0.0.1 is free")


def _candidates() -> list[int]:
    try:
        end = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    ports = range(_FIRST, end)
    return random.sample(ports, min(_TRIES, len(ports)))
