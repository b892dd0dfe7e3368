"""Capabilities that are declared absent: their use must be refused, cleanly and at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvtransport.errors import UnsupportedError
from kvtransport_conformance import flags
from kvtransport_conformance.context import NotSupported, Ranges

if TYPE_CHECKING:
    from kvtransport_conformance.context import Context

BOUND_S = 2.0
"""A refusal that takes longer than this is a hang to whoever waits for it."""


def require(ctx: Context) -> None:
    """Return when everything the check needs is declared.

    Otherwise verify the refusal of the first thing that is not, then raise
    ``NotSupported``; an accepted use of an absent capability fails the check.
    """
    for key in ctx.check.needs:
        if ctx.supports(key):
            continue
        probe = _PROBES.get(key)
        if probe is None:
            raise NotSupported(f"{key} is declared absent; its absence has nothing to refuse")
        _timed(ctx, probe, key)
        raise NotSupported(f"{key} is declared absent and its use was refused")


def _timed(ctx: Context, probe: Callable[[Context], None], key: str) -> None:
    started = time.monotonic()
    probe(ctx)
    took = time.monotonic() - started
    ctx.expect(took < BOUND_S + 1, f"refusing {key} took {took:.1f} s")


def op_refused(ctx: Context, op: str) -> None:
    """The core and the backend itself both refuse ``op``."""
    scene = ctx.scene(4096)
    whole = Ranges.whole(4096)
    ctx.raises(UnsupportedError, lambda: scene.move(op, whole), f"{op} is declared absent")
    source = ctx.a.register("extra", "src")[0]
    raw = ctx.a.raw_move(op, source, 1, [[0], [0], [64]], patience_s=BOUND_S)
    ctx.expect(
        raw["outcome"] in {"refused", "failed"},
        f"the backend declares no {op}, yet a posted {op} ended as {raw['outcome']!r}",
    )


def notify_refused(ctx: Context) -> None:
    """A transfer with a notification is refused."""
    scene = ctx.scene(4096)
    ctx.raises(
        UnsupportedError,
        lambda: scene.move(ctx.op, Ranges.whole(4096), notify=b"x"),
        "a transfer with notification, although notify is declared 'none'",
    )


def cancel_refused(ctx: Context) -> None:
    """Cancel raises, and the transfer ends normally."""
    scene = ctx.scene(1 << 20)
    whole = Ranges.whole(1 << 20)
    number = scene.post(ctx.op, whole)
    if ctx.a.state(number)["state"] == "in_flight":
        ctx.raises(UnsupportedError, lambda: ctx.a.cancel(number), "cancel is declared 'none'")
    result = ctx.a.wait(number)
    ctx.expect(result["state"] == "done", f"after a refused cancel: {result}")
    scene.arrived(ctx.op, whole)


_PROBES: Mapping[str, Callable[[Context], None]] = {
    "ops.read": lambda ctx: op_refused(ctx, "read"),
    "ops.write": lambda ctx: op_refused(ctx, "write"),
    "notify": notify_refused,
    "notify_after_data": notify_refused,
    "cancel": cancel_refused,
}

assert set(_PROBES) <= set(flags.BY_KEY)
