"""Catching transfers in flight, and watching memory that must not change any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransport.errors import KVTransportError
from kvtransport_conformance.context import LATE_S, CheckFailed, Ranges
from kvtransport_conformance.patterns import Expected, Pattern
from kvtransport_conformance.sides import LocalSide

if TYPE_CHECKING:
    from kvtransport_conformance.context import Context, Scene
    from kvtransport_conformance.sides import Side

REUSED = Pattern("const", 0xB7)
"""What the memory's next owner writes."""


def catch_in_flight(scene: Scene, op: str, size: int, parts: int = 16) -> int | None:
    """Post a large transfer of several descriptors; None when it ended at once."""
    part = size // parts
    # Reversed on one side, so that the descriptors cannot be merged into one.
    starts = [part * number for number in range(parts)]
    ranges = Ranges.of(starts, list(reversed(starts)), [part] * parts)
    number = scene.post(op, ranges)
    if scene.one.state(number)["state"] == "in_flight":
        return number
    scene.one.wait(number)
    return None


def stays_as_filled(ctx: Context, sink: Side, when: str, watches: int = 1) -> None:
    """Give the destination to a new owner at once; his bytes must survive.

    Where writes are declared to end locally nobody may do that with the target's
    memory, so there the new owner comes ``LATE_S`` later.
    """
    if not ctx.supports("completion") and not isinstance(sink, LocalSide):
        ctx.pause(LATE_S)
    sink.fill("dst", REUSED.wire())
    ctx.pause(watches * ctx.settings.watch_s)
    wrong = sink.mismatch("dst", Expected(REUSED).wire())
    if wrong:
        raise CheckFailed(f"data landed {when}, in memory that was already reused: {wrong}")


def ended_state(ctx: Context, number: int, patience_s: float) -> str:
    """Terminal state of a transfer of the worker, or a failed check."""
    result = ctx.a.settle(number, patience_s)
    if result["state"] in {"in_flight", "pending", "draining"}:
        raise CheckFailed(f"the transfer is still {result['state']} after {patience_s:g} s")
    return str(result["state"])


def post_or_error(scene: Scene, op: str, ranges: Ranges, deadline_s: float) -> int | Exception:
    """Post; return the transfer's number or the typed error that refused it."""
    try:
        return scene.post(op, ranges, deadline_s=deadline_s)
    except KVTransportError as error:
        return error
