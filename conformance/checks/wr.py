"""WR: one-sided writes."""

from __future__ import annotations

from kvtransport_conformance.checks.sweeps import matrix, only_named_bytes, size_sweep
from kvtransport_conformance.context import BLANK, Context, Ranges
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check


@check(
    "WR-01", level="core", profiles=["KVT-BASE"], needs=["ops.write"], first_release=True,
    timeout_s=60,
)  # fmt: skip
def write_size_sweep(ctx: Context) -> None:
    """Writes of 1 byte to 64 MiB arrive exactly, also around page, MTU and chunk sizes."""
    size_sweep(ctx, "write")


@check("WR-02", level="core", profiles=["KVT-BASE"], needs=["ops.write"], first_release=True)
def write_only_named_bytes(ctx: Context) -> None:
    """Canaries on both sides of every written block survive."""
    only_named_bytes(ctx, "write")


@check("WR-03", level="core", profiles=["KVT-BASE"], needs=["ops.write"], first_release=True)
def write_source_unchanged(ctx: Context) -> None:
    """A write leaves its source as it was."""
    scene = ctx.scene(1 << 20)
    scene.move("write", Ranges.whole(1 << 20))
    scene.source_intact("write")


@check(
    "WR-04", level="core", profiles=["KVT-BASE"], needs=["ops.write"], first_release=True,
    covers=["ops.write", "completion"],
)  # fmt: skip
def write_source_reusable_after_done(ctx: Context) -> None:
    """The source may be overwritten at DONE; the target keeps what was sent."""
    size = ctx.settings.max_bytes // 2
    scene = ctx.scene(size)
    scene.move("write", Ranges.whole(size))
    ctx.a.fill("src", Pattern("const", 0x5A).wire())
    ctx.pause(0.2)
    want = Expected(BLANK, (Overlay(Pattern("coded", 1), (0,), (0,), (size,)),))
    ctx.same(ctx.b, "dst", want, "target after the source was reused at DONE")


@check(
    "WR-05", level="extended", profiles={"KVT-DEVICE": "core", "KVT-BASE": "extended"},
    needs=["ops.write"], covers=["ops.write"], timeout_s=60,
    why="dynamo#12463: only one pairing of device and NIC failed",
)  # fmt: skip
def write_matrix(ctx: Context) -> None:
    """Writes work between every declared pair of memory kinds."""
    matrix(ctx, "write")
