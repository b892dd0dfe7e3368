"""The internal check that moves a few bytes before the first baseline is taken.

Drivers create threads, sockets and caches at their first transfer that live as
long as the process; those are no leak of whichever check happens to run first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvtransport_conformance.registry import Check

if TYPE_CHECKING:
    from kvtransport_conformance.context import Context


def _move_something(ctx: Context) -> None:
    """Move data in every declared way, in both directions."""
    from kvtransport_conformance.context import Ranges

    scene = ctx.scene(1 << 20)
    payload = b"warm" if ctx.supports("notify") else None
    for op in ctx.ops:
        for reverse in (False, True):
            scene.move(op, Ranges.whole(1 << 20), reverse=reverse, notify=payload)
    ctx.a.notifications()
    ctx.b.notifications()


WARM_UP = Check(
    id="WARM-UP",
    name="warm_up",
    level="info",
    profiles=MappingProxyType({}),
    function=_move_something,
    noisy=True,
)
