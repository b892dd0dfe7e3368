"""The other side of every check: ``python -m kvtransport_conformance.peer``.

Reads one JSON object per line from standard input, answers on standard output;
progresses its agents while idle.  Ends at end of file.  Nothing that the backend
prints can reach the protocol, see ``wire``.
"""

from __future__ import annotations

import os
import select
import signal
from typing import Any

from kvtransport_conformance.wire import Channel, ChannelClosedError

IDLE_S = 0.001


def main() -> None:
    """Serve requests until the controller hangs up."""
    channel = Channel.claim_stdio()
    from kvtransport_conformance.process import Process

    process = Process()
    while True:
        try:
            message = _next(channel, process)
        except ChannelClosedError:
            break
        if not _serve(channel, process, message):
            break
        if message["op"] == "leave":
            return  # TD-07: an ordinary end of the interpreter, nothing closed
    # A backend's exit handlers are tested by TD-07; here they could only hang.
    os._exit(0)


def _next(channel: Channel, process: Any) -> dict[str, Any]:
    """Wait for a request and keep the agents moving meanwhile."""
    while not channel.pending():
        if select.select([channel], [], [], IDLE_S)[0]:
            break
        process.pump()
    return channel.receive()


def _serve(channel: Channel, process: Any, message: dict[str, Any]) -> bool:
    """Run one request and answer it; False when this process shall end."""
    from kvtransport_conformance.wire_errors import describe

    op = message["op"]
    if op == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    reply: dict[str, Any] = {"id": message["id"]}
    try:
        if op not in {"exit", "leave"}:
            reply["ok"] = process.dispatch(op, message.get("agent"), message.get("args", {}))
    except Exception as error:  # noqa: BLE001  # named edge: everything is reported to the check
        reply["error"] = describe(error)
    channel.send(reply)
    return bool(op != "exit")


if __name__ == "__main__":
    main()
