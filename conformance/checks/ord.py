"""ORD: ordering: what is promised, and that nothing depends on more."""

from __future__ import annotations

from kvtransport_conformance.context import BLANK, Context, Ranges
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check


@check(
    "ORD-01", level="extended", profiles={"KVT-NOTIFY": "core"},
    needs=["notify", "notify_after_data", "ops.write"], covers=["notify_after_data"],
    first_release=True,
)  # fmt: skip
def write_then_notify(ctx: Context) -> None:
    """The notification of a write of 1,000 descriptors comes after the last of them."""
    count, block = 1000, 256
    scene = ctx.scene(count * block * 2)
    for _ in range(20):
        ctx.b.fill("dst", BLANK.wire())
        last = (count - 1) * block * 2
        starts = [number * block * 2 for number in range(count)]
        payload = b"%d %d %d" % (last, last, block)
        waiting = ctx.b.start("verify_on_notice", "dst", Pattern("coded", 1).wire(), 1, 10.0)
        scene.move("write", Ranges.of(starts, starts, [block] * count), notify=payload)
        found = waiting.result()
        ctx.expect(found["seen"] == 1, "the notification did not come")
        ctx.expect(not found["early"], f"{found['early']} came before its data")


@check("ORD-02", level="core", profiles=["KVT-BASE"], needs=["ops.write"], covers=["ordering"])
def two_writes_same_range(ctx: Context) -> None:
    """Of two writes to one range the last wins: always in sequence, in flight if declared."""
    size = 1 << 20
    scene = ctx.scene(size)
    ctx.a.alloc("src2", size, Pattern("coded", 3).wire())
    ctx.a.register("src2")
    second = [scene.piece("write", Ranges.whole(size), local="src2")]
    for _ in range(10):
        numbers = [scene.post("write", Ranges.whole(size))]
        if not ctx.supports("ordering"):
            ctx.a.wait(numbers[0])
        if not ctx.supports("completion"):
            first = Overlay(scene.ends("write")[3], (0,), (0,), (size,))
            ctx.same(ctx.b, "dst", Expected(BLANK, (first,)), "the first of two writes")
        numbers.append(ctx.a.post("write", second))
        for number in numbers:
            ctx.a.wait(number)
        want = Expected(BLANK, (Overlay(Pattern("coded", 3), (0,), (0,), (size,)),))
        how = "both in flight" if ctx.supports("ordering") else "one after the other"
        ctx.same(ctx.b, "dst", want, f"two writes to one range, {how}")
    ctx.detail["pipelined"] = ctx.supports("ordering")


@check("ORD-03", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def flush_makes_visible(ctx: Context) -> None:
    """When all transfers to a peer are DONE, all of their bytes are visible together."""
    size, parts = 16 << 20, 64
    scene = ctx.scene(size)
    part = size // parts
    for op in ctx.ops:
        numbers = [scene.post(op, Ranges.of([part * n], [part * n], [part])) for n in range(parts)]
        for number in numbers:
            ctx.a.wait(number)
        _, _, sink, pattern = scene.ends(op)
        if op == "read" or ctx.supports("completion"):
            found = sink.peek("dst", size - 64, 64)
            ctx.expect(
                found == pattern.data(size - 64, 64).tobytes(),
                f"{op}s are DONE, their end is missing",
            )
        scene.arrived(op, Ranges.whole(size))


@check("ORD-04", level="extended", profiles={"KVT-READ": "core"}, needs=["ops.read", "ops.write"])
def read_after_write_same_range(ctx: Context) -> None:
    """A read after a write is DONE returns what was written, every time."""
    size = 1 << 16
    scene = ctx.scene(size)
    for key in range(20, 70):
        ctx.a.fill("src", Pattern("coded", key).wire())
        scene.move("write", Ranges.whole(size))
        want = Expected(BLANK, (Overlay(Pattern("coded", key), (0,), (0,), (size,)),))
        if not ctx.supports("completion"):
            ctx.same(ctx.b, "dst", want, f"write {key}")
        ctx.a.move("read", [["dst", "dst", [0], [0], [size]]])
        ctx.same(ctx.a, "dst", want, f"read after write {key} was DONE")


@check("ORD-05", level="core", profiles=["KVT-BASE"], needs=["op"])
def reorder_fuzz(ctx: Context) -> None:
    """Completions delivered in any order give the same bytes and end every transfer."""
    ctx.a.open(
        narrow={"max_descriptors": 4},
        faults={"reorder": True, "delay_polls": 5, "seed": ctx.seed % (1 << 31)},
    )
    size = 1 << 18
    scene = ctx.scene(size)
    for op in ctx.ops:
        for _ in range(10):
            order = ctx.rng.permutation(64) * 4096
            ranges = Ranges.of(order.tolist(), order.tolist(), [2048] * 64)
            number = scene.post(op, ranges)
            result = ctx.a.wait(number, 10.0)
            ctx.expect(result["state"] == "done", f"with reordered completions: {result}")
            scene.arrived(op, ranges, f"{op} with reordered completions")
            scene.blank(op)
