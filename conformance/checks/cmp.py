"""CMP: completion: once, visible, quiet, and never at the wrong time."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from kvtransport.errors import (
    ClosedError,
    RegionBusyError,
    TransferTimeoutError,
)
from kvtransport.events import TransferEvent
from kvtransport_conformance.checks.quiet import catch_in_flight, stays_as_filled
from kvtransport_conformance.context import Context, NotVerified, Ranges, Scene
from kvtransport_conformance.registry import check

SIZE = 1 << 16


@check("CMP-01", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def exactly_once(ctx: Context) -> None:
    """Every transfer has one terminal event, at the backend and at the user."""
    scene = ctx.scene(SIZE)
    station = ctx.a.station
    numbers = [
        scene.post(op, Ranges.of([64 * number], [64 * number], [64]))
        for op in ctx.ops
        for number in range(100)
    ]
    seen: Counter[int] = Counter()
    deadline = time.monotonic() + 10
    while len(seen) < len(numbers) and time.monotonic() < deadline:
        seen.update(
            event.transfer.transfer_id
            for event in station.agent.poll()
            if isinstance(event, TransferEvent)
        )
    ctx.pause_polling(0.3, seen)
    ctx.expect(set(seen) == set(numbers), f"{len(set(numbers) - set(seen))} transfers never ended")
    ctx.expect(max(seen.values()) == 1, f"a transfer ended {max(seen.values())} times")
    tap = station.tap
    twice = [ticket for ticket, count in tap.completions.items() if count != 1]
    ctx.expect(not twice, f"the backend completed tickets {twice[:5]} more than once")
    unknown = set(tap.completions) - set(tap.posted)
    ctx.expect(not unknown, f"the backend completed tickets that were never posted: {unknown}")


@check(
    "CMP-02", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True,
    covers=["completion"], why="libfabric separates transmit completion from delivery completion",
)  # fmt: skip
def done_means_visible(ctx: Context) -> None:
    """At DONE the destination's own process sees every byte."""
    size = ctx.settings.max_bytes
    scene = ctx.scene(size)
    if ctx.ops == ["write"] and not ctx.supports("completion"):
        raise NotVerified("writes are declared to end locally, and there are no reads")
    for op in ctx.ops:
        if op == "write" and not ctx.supports("completion"):
            continue
        for _ in range(3):
            scene.move(op, Ranges.whole(size))
            _, _, sink, pattern = scene.ends(op)
            # The last bytes first: whatever is late is late there.
            for at in (size - 64, size // 2, 0):
                found = sink.peek("dst", at, 64)
                ctx.expect(
                    found == pattern.data(at, 64).tobytes(),
                    f"{op} is DONE, but byte {at} of {size} has not arrived",
                )
            scene.arrived(op, Ranges.whole(size))
            scene.blank(op)


@check("CMP-03", level="core", profiles=["KVT-BASE", "KVT-SCALE"], needs=["op"], first_release=True)
def poll_does_not_block(ctx: Context) -> None:
    """``poll`` returns within 50 ms in 99 of 100 calls, idle and under load."""
    size = ctx.settings.max_bytes // 4
    scene = ctx.scene(size)
    tap = ctx.a.station.tap
    for _ in range(200):
        ctx.a.station.agent.poll()
    for _ in range(10):
        number = scene.post(ctx.op, Ranges.whole(size))
        ctx.a.wait(number)
    spent = np.array(tap.poll_seconds)
    p99 = float(np.percentile(spent, 99))
    ctx.detail.update(
        polls=len(spent), p99_ms=round(p99 * 1e3, 3), max_ms=round(float(spent.max()) * 1e3, 3)
    )
    ctx.expect(p99 < 0.05, f"poll took {p99 * 1e3:.0f} ms at the 99th percentile")


@check(
    "CMP-04", level="core", profiles=["KVT-BASE"], needs=["op"],
    why="vLLM's DataTransport.poll needed a peer filter: one poll took its siblings' events",
)  # fmt: skip
def poll_is_shared_safely(ctx: Context) -> None:
    """Waiting for one transfer never takes another's event away."""
    scene = ctx.scene(SIZE)
    numbers = [scene.post(ctx.op, Ranges.of([64 * n], [64 * n], [64])) for n in range(32)]
    for number in reversed(numbers):
        ctx.a.wait(number)
    seen = Counter(
        event.transfer.transfer_id
        for event in ctx.a.station.agent.poll()
        if isinstance(event, TransferEvent)
    )
    lost = set(numbers) - set(seen)
    ctx.expect(not lost, f"waiting for one transfer lost the events of {len(lost)} others")
    ctx.expect(max(seen.values()) == 1, "an event was delivered twice")


@check(
    "CMP-05", level="core", profiles=["KVT-FAULT"], needs=["op"], first_release=True, noisy=True,
    why="pegaflow#403: memory was given back although the transfer was still running",
)  # fmt: skip
def timeout_keeps_memory_pinned(ctx: Context) -> None:
    """A timed-out wait leaves the transfer draining and its region busy."""
    # A held completion makes the moment certain; the backend below is the real one.
    ctx.a.open(faults={"hold_completions_s": 1.0})
    scene = ctx.scene(SIZE)
    number = scene.post(ctx.op, Ranges.whole(SIZE))
    transfer = ctx.a.station.transfers[number]
    ctx.raises(TransferTimeoutError, lambda: transfer.wait(0.05), "a wait of 50 ms")
    state = ctx.a.state(number)["state"]
    ctx.expect(state == "draining", f"after the timeout the transfer is {state}, not draining")
    local = "src" if ctx.op == "write" else "dst"
    ctx.raises(RegionBusyError, lambda: ctx.a.deregister(local), "deregister while it drains")
    result = ctx.a.settle(number, 5.0)
    ctx.expect(result["state"] in {"done", "failed"}, f"it never became quiet: {result}")
    ctx.a.deregister(local)


@check(
    "CMP-06", level="core", profiles=["KVT-FAULT"], needs=["op"], first_release=True, noisy=True,
    timeout_s=60,
    why="vllm#56104, pegaflow#403, vllm-omni#6264: blocks were reused while data still landed",
)  # fmt: skip
def failure_after_quiesce(ctx: Context) -> None:
    """After a transfer that was given up has ended nothing of it lands, in any descriptor."""
    size = ctx.settings.max_bytes
    ctx.detail["caught"] = _give_up_in_flight(ctx, ctx.scene(size), size)
    if ctx.detail["caught"]:
        return
    # A backend that moves everything inside ``post`` is never caught; held completions
    # make the moment certain, and what lands is still the real backend's doing.
    ctx.b.reset()
    ctx.a.station.reset()
    ctx.a.open(faults={"hold_completions_s": 0.3})
    ctx.detail["caught_held"] = _give_up_in_flight(ctx, ctx.scene(SIZE), SIZE)
    ctx.expect(ctx.detail["caught_held"], "a transfer whose completion is held was not in flight")


def _give_up_in_flight(ctx: Context, scene: Scene, size: int) -> int:
    """Let transfers time out at once; return how many, after showing that each became quiet."""
    caught = 0
    for op in ctx.ops:
        for _ in range(2):
            number = catch_in_flight(scene, op, size)
            if number is None:
                continue
            ctx.a.wait(number, 0.0)
            state = ctx.a.settle(number, 15.0)["state"]
            ctx.expect(state != "draining", "the transfer never became quiet nor quarantined")
            if state != "quarantined":
                caught += 1
                stays_as_filled(ctx, scene.ends(op)[2], f"after a {op} ended {state}")
            scene.blank(op)
    return caught


@check("CMP-07", level="core", profiles=["KVT-BASE"], needs=["op"], noisy=True)
def use_after_release(ctx: Context) -> None:
    """Handles of a closed agent refuse with ``ClosedError``; ended transfers stay readable."""
    scene = ctx.scene(SIZE)
    number = scene.post(ctx.op, Ranges.whole(SIZE))
    ctx.a.wait(number)
    station = ctx.a.station
    agent, peer, transfer = station.agent, station.peers["peer"], station.transfers[number]
    pairs = station.pairs([scene.piece(ctx.op, Ranges.whole(64))], "peer")
    station.close()
    call = agent.write if ctx.op == "write" else agent.read
    ctx.raises(ClosedError, lambda: call(peer, pairs), "a transfer on a closed agent")
    transfer.cancel()
    transfer.wait(0.1)
    ctx.expect(transfer.poll().value == "done", f"an ended transfer became {transfer.state}")


@check("CMP-08", level="core", profiles=["KVT-BASE"], needs=["op"])
def bytes_accounted(ctx: Context) -> None:
    """Reported bytes are the sum of the descriptors, in handle, backend and totals."""
    scene = ctx.scene(SIZE)
    total = 0
    for op in ctx.ops:
        for sizes in ([64], [64, 128, 256], [4096] * 7):
            starts = [8192 * index for index in range(len(sizes))]
            result = scene.move(op, Ranges.of(starts, starts, sizes))
            total += sum(sizes)
            ctx.expect(
                result["nbytes"] == sum(sizes), f"{sizes} were reported as {result['nbytes']} bytes"
            )
    station = ctx.a.station
    moved = sum(station.agent.stats().bytes_moved.values())
    ctx.expect(moved == total, f"the agent counted {moved} bytes, {total} were moved")
    posted = sum(station.tap.posted.values())
    ctx.expect(posted == total, f"the backend was asked for {posted} bytes, not {total}")


@check("CMP-09", level="extended", profiles=["KVT-BASE"], needs=["op", "progress"])
def progress_mode_true(ctx: Context) -> None:
    """With automatic progress a transfer ends although nobody polls on either side."""
    scene = ctx.scene(1 << 20)
    ctx.a.set_polling(False)
    ctx.b.set_polling(False)
    number = scene.post(ctx.op, Ranges.whole(1 << 20))
    _, _, sink, pattern = scene.ends(ctx.op)
    want = pattern.data((1 << 20) - 64, 64).tobytes()
    deadline = time.monotonic() + 5.0
    while sink.peek("dst", (1 << 20) - 64, 64) != want:
        ctx.expect(time.monotonic() < deadline, "no data after 5 s without polling")
        time.sleep(0.01)
    ctx.a.wait(number)
    scene.arrived(ctx.op, Ranges.whole(1 << 20))


@check(
    "CMP-10", level="core", profiles=["KVT-FAULT"], needs=["op"], noisy=True,
    why="vllm#50754: a post that failed half-way left the earlier parts running",
)  # fmt: skip
def partial_post_failure(ctx: Context) -> None:
    """When posting part k fails, the parts before drain and one failure is reported."""
    ctx.a.open(narrow={"max_descriptors": 2}, faults={"fail_post": 3})
    scene = ctx.scene(SIZE)
    starts = [8192 * number for number in range(8)]
    number = scene.post(ctx.op, Ranges.of(starts, starts, [64] * 8))
    result = ctx.a.wait(number, 10.0)
    ctx.expect(result["state"] == "failed", f"one of four parts failed, the state is {result}")
    events = [e for e in ctx.a.station.agent.poll() if isinstance(e, TransferEvent)]
    ctx.expect(len(events) == 1, f"{len(events)} terminal events for one transfer")
    ctx.a.station.agent.deregister(
        ctx.a.station.regions["src" if ctx.op == "write" else "dst"], drain_s=1.0
    )
    sink = scene.ends(ctx.op)[2]
    stays_as_filled(ctx, sink, "after a partly posted transfer had failed")
