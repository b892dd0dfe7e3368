"""RD: one-sided reads."""

from __future__ import annotations

from kvtransport.errors import UnsupportedError
from kvtransport_conformance import refusals
from kvtransport_conformance.checks.sweeps import matrix, only_named_bytes, size_sweep
from kvtransport_conformance.context import BLANK, Context, Ranges
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check

_READ = {"KVT-READ": "core", "KVT-BASE": "extended"}


@check(
    "RD-01", level="extended", profiles=_READ, needs=["ops.read"], first_release=True, timeout_s=60
)
def read_size_sweep(ctx: Context) -> None:
    """Reads of 1 byte to 64 MiB arrive exactly, also around page, MTU and chunk sizes."""
    size_sweep(ctx, "read")


@check("RD-02", level="extended", profiles=_READ, needs=["ops.read"], first_release=True)
def read_only_named_bytes(ctx: Context) -> None:
    """Canaries on both sides of every block read survive in local memory."""
    only_named_bytes(ctx, "read")


@check("RD-03", level="extended", profiles=_READ, needs=["ops.read"])
def read_remote_unchanged(ctx: Context) -> None:
    """A read leaves the peer's memory as it was."""
    scene = ctx.scene(1 << 20)
    scene.move("read", Ranges.whole(1 << 20))
    scene.source_intact("read")
    scene.untouched("write", "the peer's other buffer")


@check("RD-04", level="extended", profiles=_READ, needs=["ops.read"], first_release=True)
def read_sees_completed_peer_write(ctx: Context) -> None:
    """A read sees what the peer's own processor wrote before, at once and every time."""
    size = 1 << 16
    scene = ctx.scene(size)
    for key in range(10, 40):
        ctx.b.fill("src", Pattern("coded", key).wire())
        scene.move("read", Ranges.whole(size))
        want = Expected(BLANK, (Overlay(Pattern("coded", key), (0,), (0,), (size,)),))
        ctx.same(ctx.a, "dst", want, f"read after the peer's fill {key}")


@check(
    "RD-05", level="extended", profiles={"KVT-DEVICE": "core", "KVT-READ": "extended"},
    needs=["ops.read"], timeout_s=60,
)  # fmt: skip
def read_matrix(ctx: Context) -> None:
    """Reads work between every declared pair of memory kinds."""
    matrix(ctx, "read")


@check("RD-06", level="core", profiles=["KVT-BASE", "KVT-READ"], needs=["op"])
def read_absent_refused(ctx: Context) -> None:
    """Without declared read, a read raises ``UnsupportedError`` at once and moves nothing."""
    if not ctx.supports("ops.read"):
        refusals.op_refused(ctx, "read")
        return
    ctx.a.open(narrow={"ops": ["write"]})
    scene = ctx.scene(4096)
    error = ctx.raises(
        UnsupportedError, lambda: scene.move("read", Ranges.whole(4096)), "an undeclared read"
    )
    ctx.expect(getattr(error, "capability", None), "the error does not name the capability")
    scene.untouched("read")
