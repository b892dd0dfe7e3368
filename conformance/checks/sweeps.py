"""What reads and writes share: sizes, canaries and pairs of memory kinds."""

from __future__ import annotations

from kvtransport_conformance.context import Context, NotVerified, Ranges

SIZES = (
    1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 1000,
    4095, 4096, 4097, 8191, 8192, 8193, 65_535, 65_536, 65_537,
    262_143, 262_145, 1_048_575, 1_048_576, 1_048_577,
)  # fmt: skip
"""Around a page, EFA's MTU, common eager limits, striping thresholds and chunks."""

GAP = 64


def size_sweep(ctx: Context, op: str) -> None:
    """Each size as a transfer of its own, with gaps, then the largest one."""
    sizes = sorted({-(-size // ctx.align) * ctx.align for size in SIZES})
    gap = GAP * ctx.align
    starts, position = [], gap
    for size in sizes:
        starts.append(position)
        position += -(-size // ctx.align) * ctx.align + gap
    scene = ctx.scene(position)
    for start, size in zip(starts, sizes, strict=True):
        result = scene.move(op, Ranges.of([start], [start], [size]))
        ctx.expect(result["nbytes"] == size, f"{op} of {size} bytes reported {result['nbytes']}")
    scene.arrived(op, Ranges.of(starts, starts, sizes), f"{op} of sizes {sizes[0]} to {sizes[-1]}")
    largest = ctx.settings.max_bytes
    wide = ctx.scene(largest, one=ctx.local("wide"), other=ctx.peer.side("wide"))
    wide.move(op, Ranges.whole(largest))
    wide.arrived(op, Ranges.whole(largest), f"{op} of {largest} bytes")


def only_named_bytes(ctx: Context, op: str) -> None:
    """Blocks of many sizes with canaries of one alignment unit around each."""
    unit = ctx.align
    scene = ctx.scene(1 << 18)
    for size in (1, 7, 64, 4095, 4096, 4097):
        rounded = -(-size // unit) * unit
        step = rounded + unit
        count = min(40, (1 << 18) // step - 1)
        starts = [unit + number * step for number in range(count)]
        shuffled = ctx.rng.permutation(starts).tolist()
        ranges = Ranges.of(starts, shuffled, [rounded] * count)
        scene.move(op, ranges)
        scene.arrived(op, ranges, f"{op} of {count} blocks of {rounded} bytes, {unit} bytes apart")
        scene.blank(op)


def matrix(ctx: Context, op: str) -> None:
    """Every declared (local kind, remote kind); kinds without a memory kit are named."""
    kits = {kit.kind for kit in ctx.a.station.loaded.target.memory}
    pairs = [(local, remote) for local, remote in ctx.caps["memory"]]
    missing = sorted({kind for pair in pairs for kind in pair} - kits)
    for number, (local, remote) in enumerate(pairs):
        if {local, remote} <= kits:
            sides = ctx.local(f"m{number}"), ctx.peer.side(f"m{number}")
            scene = ctx.scene(1 << 20, one=sides[0], other=sides[1], kinds=(local, remote))
            scene.move(op, Ranges.whole(1 << 20))
            scene.arrived(op, Ranges.whole(1 << 20), f"{op} between {local} and {remote} memory")
            for side in sides:
                side.close()
            ctx.detail[f"{local}-{remote}"] = "PASS"
        else:
            ctx.detail[f"{local}-{remote}"] = "NOT_VERIFIED"
    if missing:
        raise NotVerified(f"no memory of kind {', '.join(missing)} here (no memory kit for it)")
