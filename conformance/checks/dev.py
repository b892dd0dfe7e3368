"""DEV: device memory; verified only where a memory kit reaches a real device."""

from __future__ import annotations

from kvtransport_conformance.context import Context, NotVerified, Ranges
from kvtransport_conformance.registry import check


def _device(ctx: Context) -> str:
    """The kind of real device memory under test."""
    for kit in ctx.a.station.loaded.target.memory:
        if kit.kind != "host" and kit.device_info().get("driver"):
            return kit.kind
    raise NotVerified("no memory kit reaches a real device here")


@check("DEV-01", level="extended", profiles={"KVT-DEVICE": "core"}, needs=["op"])
def stream_visibility(ctx: Context) -> None:
    """At DONE the device itself sees the data, as its memory kit reads it, every time."""
    kind = _device(ctx)
    size = 1 << 20
    for op in ctx.ops:
        if [kind, kind] not in [list(pair) for pair in ctx.caps["memory"]]:
            raise NotVerified(f"({kind}, {kind}) is not declared")
        one, other = ctx.local(f"dev-{op}"), ctx.peer.side(f"dev-{op}")
        scene = ctx.scene(size, one=one, other=other, kinds=(kind, kind))
        for _ in range(50):
            scene.move(op, Ranges.whole(size))
            scene.arrived(op, Ranges.whole(size), f"{op} as {kind} memory sees it")
            scene.blank(op)


@check(
    "DEV-02", level="extended", profiles=["KVT-DEVICE"], needs=["op"],
    why="dynamo#12463: only one adjacency of device and NIC failed",
)  # fmt: skip
def pair_topology(ctx: Context) -> None:
    """Every device of the host works, not only the first."""
    kind = _device(ctx)
    kits = [kit for kit in ctx.a.station.loaded.target.memory if kit.kind == kind]
    if len({kit.device for kit in kits}) < 2:
        raise NotVerified("the target's kits name only one device")
    raise NotVerified("several devices of one kind need a target for each; run them one by one")
