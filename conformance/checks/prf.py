"""PRF: speed, recorded with its environment; only PRF-07 can contradict a claim."""

from __future__ import annotations

import time

import numpy as np

from kvtransport_conformance.context import Context, Ranges
from kvtransport_conformance.registry import check

_PERF = ["KVT-PERF"]
MIB = 1 << 20


def _best_seconds(ctx: Context, op: str, size: int, repeats: int) -> float:
    scene = ctx.scene(size, one=ctx.local(op), other=ctx.peer.side(op))
    piece = [scene.piece(op, Ranges.whole(size))]
    best = float("inf")
    for _ in range(repeats):
        result = ctx.local(op).rounds(op, [piece], 1, 1)
        ctx.expect(result["failure"] is None, f"{op}: {result['failure']}")
        best = min(best, result["seconds"])
    return best


@check("PRF-01", level="info", profiles=_PERF, needs=["op"], timeout_s=60)
def bandwidth_64mib(ctx: Context) -> None:
    """Best of ten transfers of 64 MiB, in GB/s."""
    for op in ctx.ops:
        took = _best_seconds(ctx, op, 64 * MIB, 10)
        ctx.detail[f"{op}_gb_per_s"] = round(64 * MIB / took / 1e9, 2)


@check("PRF-02", level="info", profiles=_PERF, needs=["op"], timeout_s=60)
def latency_4kib(ctx: Context) -> None:
    """Time of a single 4 KiB transfer, post to DONE, median and 99th percentile."""
    scene = ctx.scene(4096)
    station = ctx.a.station
    for op in ctx.ops:
        pairs = station.pairs([scene.piece(op, Ranges.whole(4096))], "peer")
        call = station.agent.write if op == "write" else station.agent.read
        spent = []
        for _ in range(1000):
            started = time.perf_counter()
            call(station.peers["peer"], pairs).wait()
            spent.append(time.perf_counter() - started)
        for percent in (50, 99):
            ctx.detail[f"{op}_p{percent}_us"] = round(float(np.percentile(spent, percent)) * 1e6, 1)


@check("PRF-03", level="info", profiles=_PERF, needs=["op"], timeout_s=60)
def small_block_rate(ctx: Context) -> None:
    """Scattered 4 KiB blocks per second, 1,024 to a transfer."""
    count = 1024
    scene = ctx.scene(2 * count * 4096)
    starts = [8192 * number for number in range(count)]
    for op in ctx.ops:
        piece = [scene.piece(op, Ranges.of(starts, starts, [4096] * count))]
        result = ctx.a.rounds(op, [piece], 20, 2)
        ctx.expect(result["failure"] is None, f"{op}: {result['failure']}")
        ctx.detail[f"{op}_blocks_per_s"] = round(20 * count / result["seconds"])


@check("PRF-04", level="info", profiles=_PERF, timeout_s=60)
def register_cost(ctx: Context) -> None:
    """Time to register and to deregister 64 MiB, median of 20."""
    station = ctx.a.station
    kit = station.loaded.kit()
    buffer = kit.alloc(64 * MIB)
    spent: dict[str, list[float]] = {"register": [], "deregister": []}
    for _ in range(20):
        started = time.perf_counter()
        region = station.agent.register(buffer, kind=kit.kind, device=kit.device)
        middle = time.perf_counter()
        station.agent.deregister(region)
        spent["register"].append(middle - started)
        spent["deregister"].append(time.perf_counter() - middle)
    for name, values in spent.items():
        ctx.detail[f"{name}_us"] = round(float(np.median(values)) * 1e6, 1)
    kit.free(buffer)


@check("PRF-05", level="info", profiles=_PERF, needs=["op"], timeout_s=60)
def ratio_to_raw(ctx: Context) -> None:
    """64 MiB in relation to one memcpy of the same size in this process."""
    source, sink = np.ones(64 * MIB, np.uint8), np.ones(64 * MIB, np.uint8)
    copies = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(sink, source)
        copies.append(time.perf_counter() - started)
    for op in ctx.ops:
        took = _best_seconds(ctx, op, 64 * MIB, 5)
        ctx.detail[f"{op}_of_memcpy"] = round(min(copies) / took, 2)


@check("PRF-06", level="info", profiles=_PERF, needs=["op"], timeout_s=60)
def gil_held(ctx: Context) -> None:
    """Longest time that ``post`` and ``poll`` kept the caller, for 16 MiB transfers."""
    scene = ctx.scene(16 * MIB)
    for _ in range(10):
        scene.move(ctx.op, Ranges.whole(16 * MIB))
    tap = ctx.a.station.tap
    ctx.detail.update(
        post_max_ms=round(max(tap.post_seconds) * 1e3, 2),
        poll_max_ms=round(max(tap.poll_seconds) * 1e3, 2),
    )


@check(
    "PRF-07", level="extended", profiles=["KVT-BASE"], needs=["op", "path_evidence"],
    covers=["path_evidence"],
    why="nixl#1656: RDMA writes were silently emulated and no counter ever moved",
)  # fmt: skip
def path_evidence(ctx: Context) -> None:
    """The declared counters move by at least the payload: the claimed path is really used."""
    size = 16 * MIB
    scene = ctx.scene(size)
    names = ctx.caps["path_evidence"]
    before = _counters(ctx)
    for op in ctx.ops:
        scene.move(op, Ranges.whole(size))
    after = _counters(ctx)
    moved = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    ctx.detail.update(moved)
    total = sum(moved.values())
    ctx.expect(
        total >= size * len(ctx.ops),
        f"{size * len(ctx.ops)} bytes were moved, the declared counters {names} moved by {total}",
    )


def _counters(ctx: Context) -> dict[str, int]:
    """Counters of both sides, the target's own included."""
    total: dict[str, int] = {}
    extra = ctx.a.station.loaded.target.counters() or {}
    for found in (ctx.a.counters(), ctx.b.counters(), extra):
        for name, value in found.items():
            total[name] = total.get(name, 0) + value
    return total
