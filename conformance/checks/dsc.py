"""DSC: descriptors: how blocks are laid out, counted, merged and refused."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvtransport.backend import Op
from kvtransport.errors import DescriptorError, LengthMismatchError
from kvtransport.layout.blocks import BlockTable, Pair
from kvtransport_conformance.context import BLANK, Context, Ranges, Scene
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check

SIZE = 1 << 18
EIGHT = 8


def scattered(ctx: Context, count: int, nbytes: int, stride: int) -> Ranges:
    """``count`` blocks with gaps, in different random orders on both sides."""
    source = ctx.rng.permutation(count) * stride
    at = ctx.rng.permutation(count) * stride
    return Ranges.of(source.tolist(), at.tolist(), [nbytes] * count)


def aligned(ctx: Context, nbytes: int) -> int:
    """``nbytes`` rounded up to the declared alignment."""
    return -(-nbytes // ctx.align) * ctx.align


@check("DSC-01", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def single_contiguous(ctx: Context) -> None:
    """One descriptor inside a region moves exactly its bytes."""
    scene = ctx.scene(SIZE)
    ranges = Ranges.of([aligned(ctx, 4096)], [aligned(ctx, 8192)], [aligned(ctx, 10_000)])
    for op in ctx.ops:
        scene.move(op, ranges)
        scene.arrived(op, ranges)


@check(
    "DSC-02", level="core", profiles=["KVT-BASE", "KVT-LAYOUT"], needs=["op"], first_release=True
)
def permuted_blocks(ctx: Context) -> None:
    """Blocks in a random order, a different one on each side, land where they are named."""
    scene = ctx.scene(SIZE)
    ranges = scattered(ctx, 64, 4096, 4096)
    for op in ctx.ops:
        scene.move(op, ranges)
        scene.arrived(op, ranges)


@check(
    "DSC-03", level="core", profiles=["KVT-BASE", "KVT-LAYOUT"], needs=["op"], first_release=True
)
def strided_gaps_untouched(ctx: Context) -> None:
    """Bytes between the named blocks keep their contents."""
    scene = ctx.scene(SIZE)
    block = aligned(ctx, 1000)
    starts = list(range(0, SIZE - 4096, 4096))
    ranges = Ranges.of(starts, starts, [block] * len(starts))
    for op in ctx.ops:
        scene.move(op, ranges)
        scene.arrived(op, ranges, f"blocks of {block} bytes with gaps")


@check("DSC-04", level="core", profiles=["KVT-BASE", "KVT-LAYOUT"], needs=["op"])
def mixed_lengths(ctx: Context) -> None:
    """Descriptors of very different lengths share one transfer."""
    scene = ctx.scene(SIZE)
    sizes = [aligned(ctx, size) for size in (1, 4096, 7, 65_536, 513, 8193, 2, 31_000)]
    starts = (np.cumsum([0, *sizes[:-1]]) + np.arange(len(sizes)) * 64 * ctx.align).tolist()
    ranges = Ranges.of(starts, starts, sizes)
    for op in ctx.ops:
        scene.move(op, ranges)
        scene.arrived(op, ranges)


@check(
    "DSC-05", level="core", profiles=["KVT-BASE", "KVT-SCALE"], needs=["op"], first_release=True,
    timeout_s=60, why="nixl#1862: batches of 15, 16 or 31 descriptors hung on EFA",
)  # fmt: skip
def descriptor_counts(ctx: Context) -> None:
    """Every count of descriptors completes: 1 to 33, powers of two, and the declared limit."""
    limit = ctx.caps["max_descriptors"]
    counts = [*range(1, 34), 63, 64, 65, 255, 256, 1023, 1024, 1025]
    if limit is not None and limit <= 65_536:
        counts += [limit - 1, limit, limit + 1]
    block = aligned(ctx, 64)
    scene = ctx.scene(max(counts) * 2 * block)
    for op in ctx.ops:
        for count in sorted({count for count in counts if count > 0}):
            ranges = scattered(ctx, count, block, 2 * block)
            result = scene.move(op, ranges)
            ctx.expect(
                result["nbytes"] == count * block,
                f"{op} of {count} descriptors reported {result['nbytes']} bytes",
            )
            if count in {1, 16, 33, 1025}:
                scene.arrived(op, ranges, f"{op} of {count} descriptors")
            scene.blank(op)


@check("DSC-06", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def length_mismatch_refused(ctx: Context) -> None:
    """Unequal local and remote lengths or counts are refused before anything is posted."""
    scene = ctx.scene(SIZE)
    local, remote = ("src", "dst") if ctx.op == "write" else ("dst", "src")
    for piece in ([[0, 64], [0], [64]], [[0], [0, 64], [64]], [[0, 64], [0, 64], [64, 64, 64]]):
        ctx.raises(
            LengthMismatchError,
            partial(ctx.a.move, ctx.op, [[local, remote, *piece]]),
            "vectors of unequal length",
        )
    station = ctx.a.station
    tables = (
        BlockTable(station.regions[local], 0, 4096, 4096, 4),
        BlockTable(station.peers["peer"].region(remote), 0, 8192, 8192, 4),
    )
    pair = Pair.blocks(*tables, np.arange(4), np.arange(4))
    call = station.agent.write if ctx.op == "write" else station.agent.read
    ctx.raises(
        LengthMismatchError, lambda: call(station.peers["peer"], [pair]), "blocks of unequal size"
    )
    ctx.expect(not station.tap.attempts, "the refused transfer reached the backend")
    scene.untouched(ctx.op)


@check("DSC-07", level="core", profiles=["KVT-BASE"], needs=["op"])
def empty_list_defined(ctx: Context) -> None:
    """A transfer of nothing is DONE with 0 bytes, and its notification is still sent."""
    scene = ctx.scene(4096)
    payload = b"empty" if ctx.supports("notify") else None
    result = ctx.a.move(ctx.op, [], notify=payload)
    ctx.expect(result["nbytes"] == 0, f"an empty transfer reported {result['nbytes']} bytes")
    if payload is not None:
        got = ctx.b.await_notifications(1, 5.0)
        ctx.expect([entry[1] for entry in got] == [payload], f"notifications received: {got}")
    scene.untouched(ctx.op)


@check("DSC-08", level="core", profiles=["KVT-BASE"], needs=["op"])
def overlapping_destination_refused(ctx: Context) -> None:
    """Two descriptors of one transfer that write the same bytes are refused."""
    scene = ctx.scene(SIZE)
    unit = aligned(ctx, 64)
    for at in ([0, 0], [0, unit], [unit, 0]):
        ranges = Ranges.of([0, 4 * unit], at, [2 * unit, 2 * unit])
        ctx.raises(DescriptorError, partial(scene.move, ctx.op, ranges), f"destinations {at}")
    ctx.expect(not ctx.a.station.tap.attempts, "the refused transfer reached the backend")
    scene.untouched(ctx.op)


@check(
    "DSC-09", level="core", profiles=["KVT-BASE", "KVT-LAYOUT"], needs=["op"],
    why="vLLM 0.32 holds three different merge algorithms",
)  # fmt: skip
def merged_equals_unmerged(ctx: Context) -> None:
    """Merging neighbours never changes bytes: random index vectors against one by one."""
    block, count = 4096, 48
    scene = ctx.scene(block * count)
    for op in ctx.ops:
        for _ in range(12):
            _merge_once(ctx, scene, op, block, count)


def _merge_once(ctx: Context, scene: Scene, op: str, block: int, count: int) -> None:
    taken = int(ctx.rng.integers(1, count + 1))
    source = np.sort(ctx.rng.choice(count, taken, replace=False))
    at = np.sort(ctx.rng.choice(count, taken, replace=False))
    if ctx.rng.random() < 0.5:
        at = ctx.rng.permutation(at)
    station = ctx.a.station
    peer = station.peers["peer"]
    local, remote = ("src", "dst") if op == "write" else ("dst", "src")
    mine = BlockTable(station.regions[local], 0, block, block, count)
    theirs = BlockTable(peer.region(remote), 0, block, block, count)
    indices = (source, at) if op == "write" else (at, source)
    plan = station.agent.prepare(Op(op), peer, [Pair.blocks(mine, theirs, *indices)])
    station.agent.post(plan).wait()
    merged = Ranges.of((source * block).tolist(), (at * block).tolist(), [block] * taken)
    scene.arrived(op, merged, f"merged {op} of {taken} blocks")
    ctx.expect(plan.nbytes == taken * block, f"plan says {plan.nbytes} bytes for {taken} blocks")
    scene.blank(op)
    for one in range(taken):
        piece = Ranges.of([merged.source[one]], [merged.at[one]], [block])
        scene.move(op, piece)
    scene.arrived(op, merged, f"unmerged {op} of {taken} blocks")
    scene.blank(op)


@check("DSC-10", level="extended", profiles=["KVT-SCALE"], needs=["op"], timeout_s=60)
def prepared_list_reuse(ctx: Context) -> None:
    """A prepared transfer posted 1,000 times gives the same result and nothing grows."""
    ctx.scene(SIZE)
    station = ctx.a.station
    peer = station.peers["peer"]
    local, remote = ("src", "dst") if ctx.op == "write" else ("dst", "src")
    pair = Pair.ranges(
        station.regions[local], [0, 8192], peer.region(remote), [0, 8192], [4096, 4096]
    )
    plan = station.agent.prepare(Op(ctx.op), peer, [pair])
    held: list[list[str]] = []
    for number in range(1000):
        station.agent.post(plan).wait()
        if number in {99, 999}:
            station.agent.poll()
            held.append(ctx.process.held())
    sink, key = (ctx.b, 1) if ctx.op == "write" else (ctx.a, 2)
    want = Expected(BLANK, (Overlay(Pattern("coded", key), (0, 8192), (0, 8192), (4096, 4096)),))
    ctx.same(sink, "dst", want, "after 1,000 posts of one plan")
    ctx.expect(held[1] == held[0], f"held after 100 posts: {held[0]}, after 1,000: {held[1]}")
