"""The process that runs check functions: ``python -m kvtransport_conformance.worker``.

It holds the local side of every check and is never trusted to survive: the
controller watches it, and a crash or hang here costs one result, not the report.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

from kvtransport_conformance.wire import Channel, ChannelClosedError


def main() -> None:
    """Run the checks that the controller asks for, one after the other."""
    channel = Channel.claim_stdio()
    from kvtransport_conformance.hub import Hub
    from kvtransport_conformance.process import Process

    process = Process()
    hub = Hub(channel, process.pump)
    while True:
        try:
            message = channel.receive()
        except ChannelClosedError:
            break
        if message["op"] == "run":
            channel.send({"result": _run(message, process, hub)})
        else:
            channel.send(_answer(message, process))
    os._exit(0)


def _answer(message: dict[str, Any], process: Any) -> dict[str, Any]:
    """An operation on the worker itself (init, baseline, grade)."""
    from kvtransport_conformance.wire_errors import describe

    try:
        found = process.dispatch(message["op"], None, message.get("args", {}))
    except Exception as error:  # noqa: BLE001  # named edge: reported to the controller
        failure = {"error": describe(error), "traceback": traceback.format_exc()}
        return {"id": message["id"], **failure}
    return {"id": message["id"], "ok": found}


def _run(message: dict[str, Any], process: Any, hub: Any) -> dict[str, Any]:
    """Run one check and reduce whatever happens to a verdict."""
    from kvtransport_conformance.context import Context, Settings
    from kvtransport_conformance.registry import all_checks
    from kvtransport_conformance.warmup import WARM_UP

    name = message["check"]
    check = WARM_UP if name == WARM_UP.id else all_checks()[name]
    settings = Settings(**message["settings"])
    ctx = Context(check, message["caps"], message["seed"], settings, process, hub)
    started = time.monotonic()
    status, why = _verdict(ctx)
    return {
        "status": status,
        "why": why,
        "seconds": round(time.monotonic() - started, 4),
        "detail": ctx.detail,
    }


def _verdict(ctx: Any) -> tuple[str, str]:
    from kvtransport.errors import KVTransportError
    from kvtransport_conformance import refusals
    from kvtransport_conformance.context import CheckFailed, NotSupported, NotVerified
    from kvtransport_conformance.hub import PeerGoneError
    from kvtransport_conformance.wire_errors import ForeignError

    try:
        refusals.require(ctx)
        ctx.check.function(ctx)
    except NotSupported as verdict:
        return "NOT_SUPPORTED", str(verdict)
    except NotVerified as verdict:
        return "NOT_VERIFIED", str(verdict)
    except CheckFailed as verdict:
        return "FAIL", str(verdict)
    except PeerGoneError as error:
        return "FAIL", f"the peer process ended during an operation: {error}"
    except ForeignError as error:
        return "FAIL", f"an error outside the library's tree reached the user: {error}"
    except KVTransportError as error:
        return "FAIL", f"unexpected {type(error).__name__}: {error}{_where(error)}"
    except Exception as error:  # noqa: BLE001  # named edge: see below
        return _unexpected(ctx, error)
    return "PASS", ""


def _unexpected(ctx: Any, error: Exception) -> tuple[str, str]:
    """Blame the backend for what its own code raised, the suite for the rest."""
    text = "".join(traceback.format_exception(error)[-6:])
    for station in ctx.process.stations.values():
        if station.opened and station.tap.foreign_errors:
            return "FAIL", f"the backend raised {station.tap.foreign_errors[-1]}"
    return "ERROR", f"{type(error).__name__}: {error}\n{text}"


def _where(error: BaseException) -> str:
    """The line of the check that met the error."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/checks/" in frame.filename]
    return f" (in the check's line: {inside[-1].line})" if inside else ""


if __name__ == "__main__":
    main()
