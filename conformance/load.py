"""Many transfers in a row: keeps a window full and counts what came back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtransport.errors import BackpressureError, KVTransportError
from kvtransport.transfer import Transfer

from kvtransport_conformance.wire_errors import describe

if TYPE_CHECKING:
    from kvtransport_conformance.station import Piece, Station

_IDLE_S = 0.0002


def run_rounds(
    station: Station,
    op: str,
    pieces: Sequence[Sequence[Piece]],
    count: int,
    window: int,
    key: str,
    notify: bool,
    deadline_s: float,
) -> dict[str, Any]:
    """Post ``count`` transfers with at most ``window`` open; see ``Station.rounds``.

    Returns done, retries after backpressure, bytes, seconds, the longest pause
    between two completions and the first failure.
    """
    open_transfers: deque[Transfer] = deque()
    report: dict[str, Any] = {"done": 0, "retries": 0, "nbytes": 0, "stall_s": 0.0, "failure": None}
    prepared = [station.pairs(piece, key) for piece in pieces]
    call = station.agent.read if op == "read" else station.agent.write
    started = progressed = time.monotonic()
    posted = 0
    while report["done"] < count and report["failure"] is None:
        while posted < count and len(open_transfers) < window:
            payload = b"%d" % posted if notify else None
            try:
                transfer = call(
                    station.peers[key],
                    prepared[posted % len(prepared)],
                    deadline_s=deadline_s,
                    notify=payload,
                )
            except BackpressureError:
                report["retries"] += 1
                break
            except KVTransportError as error:
                report["failure"] = describe(error)
                break
            open_transfers.append(transfer)
            posted += 1
        finished = _collect(station, open_transfers, report)
        now = time.monotonic()
        if finished:
            report["stall_s"] = max(report["stall_s"], now - progressed)
            progressed = now
        elif now - progressed > deadline_s:
            report["failure"] = {"type": "stall", "message": f"no completion for {deadline_s} s"}
        else:
            time.sleep(0 if window > 1 else _IDLE_S)
    report["seconds"] = time.monotonic() - started
    return report


def _collect(station: Station, open_transfers: deque[Transfer], report: dict[str, Any]) -> int:
    """Take finished transfers out of the window, in any order."""
    station.agent.poll()
    finished = 0
    for transfer in list(open_transfers):
        if not transfer.done:
            continue
        open_transfers.remove(transfer)
        finished += 1
        report["done"] += 1
        report["nbytes"] += transfer.nbytes
        if transfer.state.value != "done" and report["failure"] is None:
            error = transfer.error
            report["failure"] = (
                describe(error) if error else {"type": transfer.state.value, "message": ""}
            )
    return finished
