"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Distinct ports that nobody listens on now.

    Each is chosen by the kernel by binding port 0; all are held until the last
    one is known.  Another process may still take one before it is used: whoever
    starts the listener must treat "address in use" as a failed start.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
