"""CON: concurrency: many transfers, peers and threads at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvtransport.errors import (
    BackpressureError,
    ClosedError,
    ForkError,
    KVTransportError,
    UnsupportedError,
)
from kvtransport_conformance.context import BLANK, CheckFailed, Context, NotVerified, Ranges, Scene
from kvtransport_conformance.model import ModelRun
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check

SIZE = 1 << 18
STALL_S = 5.0


def slots(scene: Scene, op: str, count: int, nbytes: int) -> list[list[list[Any]]]:
    """One piece per slot, each its own place on both sides."""
    return [
        [scene.piece(op, Ranges.of([nbytes * n], [nbytes * n], [nbytes]))] for n in range(count)
    ]


@check(
    "CON-01", level="extended", profiles={"KVT-SCALE": "core"}, needs=["op"], first_release=True,
    timeout_s=60, why="vllm#40340 hung from 128 transfers in flight on",
)  # fmt: skip
def in_flight_256(ctx: Context) -> None:
    """256 transfers in flight all complete, and none waits longer than 5 s for the next."""
    scene = ctx.scene(256 * 4096)
    for op in ctx.ops:
        result = ctx.a.rounds(op, slots(scene, op, 256, 4096), 2048, 256)
        ctx.expect(result["failure"] is None, f"{op}: {result['failure']}")
        ctx.expect(result["stall_s"] < STALL_S, f"{op} stalled for {result['stall_s']} s")
        scene.arrived(op, Ranges.whole(256 * 4096))
        ctx.detail[op] = f"{result['done'] / result['seconds']:.0f}/s"


@check(
    "CON-02", level="extended", profiles={"KVT-SCALE": "core"}, needs=["op"],
    covers=["threading"], first_release=True, timeout_s=60,
)  # fmt: skip
def threads_as_declared(ctx: Context) -> None:
    """Eight threads share one agent; the backend sees no more concurrency than it declares."""
    block, each = 4096, 100
    scene = ctx.scene(8 * block)
    station = ctx.a.station
    errors: list[str] = []
    pieces = slots(scene, ctx.op, 8, block)

    def work(index: int) -> None:
        call = station.agent.write if ctx.op == "write" else station.agent.read
        try:
            pairs = station.pairs(pieces[index], "peer")
            for _ in range(each):
                call(station.peers["peer"], pairs, deadline_s=20.0).wait()
        except KVTransportError as error:
            errors.append(f"{type(error).__name__}: {error}")

    if ctx.caps["threading"] == "single":
        _single_refuses(ctx, work, errors)
        return
    run_threads(ctx, [partial(work, index) for index in range(8)])
    ctx.expect(not errors, f"{len(errors)} threads failed: {errors[:2]}")
    scene.arrived(ctx.op, Ranges.whole(8 * block))
    if ctx.caps["threading"] != "concurrent":
        overlaps = station.tap.overlaps
        ctx.expect(not overlaps, f"{overlaps} calls overlapped, the backend declares it cannot")


def _single_refuses(ctx: Context, work: Callable[[int], None], errors: list[str]) -> None:
    run_threads(ctx, [lambda: work(0)])
    ctx.expect(
        bool(errors) and errors[0].startswith(UnsupportedError.__name__),
        f"a second thread used a single-threaded backend: {errors or 'no error'}",
    )


def run_threads(ctx: Context, jobs: list[Callable[[], None]], patience_s: float = 40.0) -> None:
    """Run all jobs at once and wait for them."""
    threads = [threading.Thread(target=job, name=f"kvt-check-{i}", daemon=True)
               for i, job in enumerate(jobs)]  # fmt: skip
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    ctx.expect(not stuck, f"threads {stuck} did not finish within {patience_s:g} s")


@check("CON-03", level="core", profiles=["KVT-BASE", "KVT-SCALE"], needs=["op"], first_release=True)
def both_directions(ctx: Context) -> None:
    """Both sides transfer at the same time, into each other's memory."""
    scene = ctx.scene(SIZE)
    for op in ctx.ops:
        pieces = slots(scene, op, 64, 4096)
        theirs = ctx.b.start("rounds", op, pieces, 512, 16)
        mine = ctx.a.rounds(op, pieces, 512, 16)
        for who, result in (("worker", mine), ("peer", theirs.result())):
            ctx.expect(result["failure"] is None, f"{op} of the {who}: {result['failure']}")
        for reverse in (False, True):
            scene.arrived(op, Ranges.whole(SIZE), reverse=reverse)
            scene.blank(op, reverse=reverse)


@check(
    "CON-04", level="extended", profiles={"KVT-SCALE": "core"}, needs=["op"], timeout_s=90,
)  # fmt: skip
def eight_peers(ctx: Context) -> None:
    """One agent serves eight peers in two processes at once; no byte goes to the wrong one."""
    other = ctx.spawn("crowd")
    sides = [process.side(f"p{n}") for process in (ctx.peer, other) for n in range(4)]
    ctx.a.alloc("src", SIZE, Pattern("coded", 1).wire())
    ctx.a.alloc("dst", SIZE, BLANK.wire())
    ctx.a.register("src")
    ctx.a.register("dst")
    numbers = []
    part = SIZE // 8
    for index, side in enumerate(sides):
        side.alloc("src", SIZE, Pattern("coded", 10 + index).wire())
        side.alloc("dst", SIZE, BLANK.wire())
        side.register("src")
        side.register("dst")
        ctx.connect(ctx.a, side, f"p{index}", "peer")
    local, remote = ("src", "dst") if ctx.op == "write" else ("dst", "src")
    for index in range(8):
        piece = [local, remote, [part * index], [part * index], [part]]
        numbers.append(ctx.a.post(ctx.op, [piece], f"p{index}"))
    for number in numbers:
        result = ctx.a.wait(number)
        ctx.expect(result["state"] == "done", f"a transfer with one of eight peers: {result}")
    _eight_arrived(ctx, sides, part)


def _eight_arrived(ctx: Context, sides: list[Any], part: int) -> None:
    overlays = []
    for index, side in enumerate(sides):
        place = ((part * index,), (part * index,), (part,))
        if ctx.op == "write":
            want = Expected(BLANK, (Overlay(Pattern("coded", 1), *place),))
            ctx.same(side, "dst", want, f"memory of peer {index} of 8")
        overlays.append(Overlay(Pattern("coded", 10 + index), *place))
    if ctx.op == "read":
        ctx.same(ctx.a, "dst", Expected(BLANK, tuple(overlays)), "memory read from eight peers")


@check(
    "CON-05", level="core", profiles=["KVT-FAULT", "KVT-SCALE"], needs=["op"], first_release=True,
    why="vllm#47495: a full queue could only be told by matching its message",
)  # fmt: skip
def queue_full_is_retryable(ctx: Context) -> None:
    """A full queue is a retryable ``BackpressureError``; nothing was posted, and retrying works."""
    declared = ctx.caps["max_in_flight"]
    limit = declared if declared is not None and declared <= 4096 else 8
    if limit != declared:
        ctx.a.open(narrow={"max_in_flight": limit})
    scene = ctx.scene(SIZE)
    ranges = Ranges.of([0], [0], [64])
    numbers = []
    error: Exception | None = None
    for _ in range(limit + 1):
        try:
            numbers.append(scene.post(ctx.op, ranges))
        except BackpressureError as refused:
            error = refused
            break
    ctx.expect(error is not None, f"{limit + 1} posts without polling were all accepted")
    ctx.expect(getattr(error, "retryable", False), "BackpressureError is not marked retryable")
    posted = len(ctx.a.station.tap.posted)
    ctx.expect(posted == len(numbers), f"{posted} posts reached the backend, {len(numbers)} should")
    for number in numbers:
        ctx.a.wait(number)
    scene.move(ctx.op, ranges)
    scene.arrived(ctx.op, ranges, "after backpressure")


@check("CON-06", level="extended", profiles=["KVT-SCALE"], needs=["op"], timeout_s=60)
def register_while_moving(ctx: Context) -> None:
    """Registering and deregistering other memory does not disturb running transfers."""
    scene = ctx.scene(SIZE)
    station = ctx.a.station
    stop = threading.Event()
    errors: list[str] = []
    extra = station.loaded.kit().alloc(1 << 16)
    kit = station.loaded.kit()

    def churn() -> None:
        count = 0
        try:
            while not stop.is_set():
                region = station.agent.register(
                    extra, name=f"churn-{count}", kind=kit.kind, device=kit.device
                )
                station.agent.deregister(region)
                count += 1
        except KVTransportError as error:
            errors.append(f"{type(error).__name__}: {error}")
        ctx.detail["registrations"] = count

    if ctx.caps["threading"] == "single":
        raise NotVerified("the backend declares threading 'single'")
    if not ctx.supports("dynamic_regions"):
        raise NotVerified("the backend declares no dynamic_regions")
    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        result = ctx.a.rounds(ctx.op, slots(scene, ctx.op, 64, 4096), 1024, 16)
    finally:
        stop.set()
        thread.join(10.0)
    ctx.expect(not errors, f"registering while moving: {errors}")
    ctx.expect(result["failure"] is None, f"moving while registering: {result['failure']}")
    scene.arrived(ctx.op, Ranges.whole(SIZE))


@check(
    "CON-07", level="core", profiles=["KVT-FAULT"], needs=["op"], first_release=True, noisy=True,
    timeout_s=90,
)  # fmt: skip
def close_races_poll(ctx: Context) -> None:
    """Closing while other threads post and poll neither crashes nor deadlocks."""
    if ctx.caps["threading"] == "single":
        raise NotVerified("the backend declares threading 'single'")
    for cycle in range(10):
        scene = ctx.scene(1 << 16, one=ctx.local(f"race-{cycle}"), back=f"r{cycle}")
        station = ctx.local(f"race-{cycle}").station
        agent, peer = station.agent, station.peers["peer"]
        pairs = station.pairs([scene.piece(ctx.op, Ranges.whole(4096))], "peer")
        call = agent.write if ctx.op == "write" else agent.read
        wrong: list[str] = []

        def bother(call: Any = call, agent: Any = agent, peer: Any = peer,
                   pairs: Any = pairs, wrong: list[str] = wrong) -> None:  # fmt: skip
            try:
                while True:
                    call(peer, pairs)
                    agent.poll()
            except BackpressureError:
                return
            except ClosedError:
                return
            except KVTransportError as error:
                wrong.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=bother, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        complaint = station.close(drain_s=10.0)
        for thread in threads:
            thread.join(10.0)
        ctx.expect(not any(t.is_alive() for t in threads), "a thread hangs after close")
        ctx.expect(not wrong, f"threads met {wrong[:2]} instead of ClosedError")
        ctx.expect(not complaint, f"close complained: {complaint}")
        ctx.b.remove_peer(f"r{cycle}")
        ctx.b.reset()


@check("CON-08", level="core", profiles=["KVT-BASE"], needs=["op"], timeout_s=60)
def model_based(ctx: Context) -> None:
    """A long random mixture of operations agrees with a model that is a dictionary of bytes."""
    ModelRun(ctx).run(steps=400)


@check("CON-09", level="core", profiles=["KVT-BASE"], needs=["op"], fresh=True)
def fork_detected(ctx: Context) -> None:
    """After fork every call raises ``ForkError``, and the parent goes on undisturbed."""
    scene = ctx.scene(SIZE)
    agent = ctx.a.station.agent
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, _uses_after_fork(agent).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        found = stream.read().decode()
    os.waitpid(child, 0)
    ctx.expect(found == "", f"in the forked child: {found or 'it ended without a word'}")
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), "in the parent after fork")


def _uses_after_fork(agent: Any) -> str:
    """Try what a child might; return what did not raise ``ForkError``."""
    wrong = []
    buffer = np.zeros(64, np.uint8)
    for name, call in (
        ("poll", agent.poll),
        ("metadata", agent.metadata),
        ("register", lambda: agent.register(buffer)),
        ("notifications", agent.notifications),
    ):
        try:
            call()
        except ForkError:
            continue
        except KVTransportError as error:
            wrong.append(f"{name} raised {type(error).__name__}")
        else:
            wrong.append(f"{name} was accepted")
    return "; ".join(wrong)


@check(
    "CON-10", level="extended", profiles=["KVT-DEVICE"],
    why="Mooncake and NIXL both carry a fix for a lost device context",
)  # fmt: skip
def thread_device_binding(ctx: Context) -> None:
    """On every thread that the core uses, the device's context is the right one."""
    driver = ctx.a.station.loaded.kit().device_info().get("driver")
    if not driver:
        raise NotVerified("the memory under test is on no real device")
    scene = ctx.scene(SIZE)
    failed: list[str] = []

    def work() -> None:
        try:
            scene.move(ctx.op, Ranges.whole(SIZE))
        except (KVTransportError, CheckFailed) as error:
            failed.append(str(error))

    run_threads(ctx, [work])
    ctx.expect(not failed, f"a transfer on a second thread: {failed}")
    scene.arrived(ctx.op, Ranges.whole(SIZE))
