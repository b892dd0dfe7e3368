"""DEV: device memory; verified only where a memory kit reaches a real device."""

from __future__ import annotations

from kvtransport_conformance.context import Context, NotVerified, Ranges
from kvtransport_conformance.registry import check


def _devices(ctx: Context) -> list[str]:
    """The kinds of real device memory under test."""
    kits = ctx.a.station.loaded.target.memory
    kinds = {kit.kind for kit in kits if kit.kind != "host" and kit.device_info().get("driver")}
    if not kinds:
        raise NotVerified("no memory kit reaches a real device here")
    return sorted(kinds)


@check("DEV-01", level="extended", profiles={"KVT-DEVICE": "core"}, needs=["op"])
def stream_visibility(ctx: Context) -> None:
    """At DONE the device itself sees the data, as its memory kit reads it, every time."""
    size = 1 << 20
    for kind in _devices(ctx):
        if [kind, kind] not in [list(pair) for pair in ctx.caps["memory"]]:
            raise NotVerified(f"({kind}, {kind}) is not declared")
        for op in ctx.ops:
            name = f"{kind}-{op}"
            scene = ctx.scene(
                size, one=ctx.local(name), other=ctx.peer.side(name), kinds=(kind, kind)
            )
            for _ in range(50):
                scene.move(op, Ranges.whole(size))
                scene.arrived(op, Ranges.whole(size), f"{op} as {kind} memory sees it")
                scene.blank(op)


@check(
    "DEV-02", level="extended", profiles=["KVT-DEVICE"], needs=["op"],
    why="dynamo#12463: only one adjacency of device and NIC failed",
)  # fmt: skip
def pair_topology(ctx: Context) -> None:
    """Every device of the host works, not only the first: not written yet, so never verified."""
    _devices(ctx)
    raise NotVerified("this release has no check of several devices: run one target for each")
