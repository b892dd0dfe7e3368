"""TD: teardown: nothing stays behind, nothing hangs, nothing is said."""

from __future__ import annotations

import time

import numpy as np

from kvtransport.errors import ClosedError
from kvtransport_conformance.checks.quiet import catch_in_flight
from kvtransport_conformance.context import Context, NotVerified, Ranges
from kvtransport_conformance.registry import check

SIZE = 1 << 16
CYCLES = 100


@check("TD-01", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def close_idempotent(ctx: Context) -> None:
    """A second and third close does nothing and raises nothing."""
    scene = ctx.scene(SIZE)
    scene.move(ctx.op, Ranges.whole(SIZE))
    station = ctx.a.station
    agent, tap = station.agent, station.tap
    agent.close()
    agent.close()
    # The backend's own close is promised to be idempotent as well.
    tap.close()
    tap.close()


@check(
    "TD-02", level="core", profiles=["KVT-BASE", "KVT-FAULT"], needs=["op"], first_release=True,
    noisy=True,
)  # fmt: skip
def close_in_flight(ctx: Context) -> None:
    """Closing with transfers in flight drains them, or raises ``UndrainedError``."""
    size = ctx.settings.max_bytes // 4
    caught = 0
    for cycle in range(4):
        one, other = ctx.local(f"closing-{cycle}"), ctx.peer.side(f"closing-{cycle}")
        if cycle == 3:
            # What moves everything inside ``post`` is caught by holding its completions.
            one.open(faults={"hold_completions_s": 0.3})
        scene = ctx.scene(size, one=one, other=other)
        number = catch_in_flight(scene, ctx.op, size)
        transfer = None if number is None else one.station.transfers[number]
        started = time.monotonic()
        complaint = one.station.close(drain_s=5.0)
        took = time.monotonic() - started
        ctx.expect(took < 15.0, f"close(drain_s=5) took {took:.1f} s")
        if transfer is not None:
            caught += 1
            ctx.detail[f"close_{cycle}"] = f"{transfer.state.value} after {took:.2f} s"
            state = transfer.state.value
            ctx.expect(transfer.done, f"after close the transfer is still {state}")
            undrained = "UndrainedError" in complaint
            ctx.expect(
                undrained == (state == "quarantined"), f"{state}, and close said {complaint!r}"
            )
        other.close()
    ctx.detail["caught"] = caught
    ctx.expect(caught, "a transfer whose completion is held was not in flight")


@check(
    "TD-03", level="core", profiles=["KVT-BASE", "KVT-SCALE"], needs=["op"], first_release=True,
    timeout_s=180, noisy=True, why="nixl#1469: repeated registration slowed down and leaked",
)  # fmt: skip
def resource_baseline(ctx: Context) -> None:
    """After 100 cycles of open, connect, move and close a process holds what it held before."""
    ctx.b.alloc("src", SIZE, ["coded", 2])
    ctx.b.alloc("dst", SIZE, ["const", 0xEE])
    ctx.b.register("src")
    ctx.b.register("dst")
    blob = ctx.b.metadata()
    resident = 0
    for cycle in range(CYCLES):
        _cycle(ctx, blob)
        if cycle == CYCLES // 5:
            resident = ctx.process.resident()
    grown = ctx.process.resident() - resident
    ctx.detail["grown_mib"] = round(grown / 2**20, 1)
    ctx.expect(grown < 64 << 20, f"80 cycles took {grown >> 20} MiB of memory for good")
    held = ctx.process.held()
    deadline = time.monotonic() + 2.0
    while held and time.monotonic() < deadline:
        time.sleep(0.05)
        held = ctx.process.held()
    ctx.expect(not held, f"after {CYCLES} cycles this process still holds {held}")


def _cycle(ctx: Context, blob: bytes) -> None:
    side = ctx.local("cycle")
    station = side.station
    station.alloc("src", SIZE, ["coded", 1])
    station.alloc("dst", SIZE, ["const", 0xEE])
    station.register("src")
    station.register("dst")
    station.add_peer(blob)
    local, remote = ("src", "dst") if ctx.op == "write" else ("dst", "src")
    station.move(ctx.op, [[local, remote, [0], [0], [4096]]])
    complaint = station.reset()
    ctx.expect(not complaint, f"close complained: {complaint}")


@check("TD-04", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True, timeout_s=60)
def fds_threads_shm_baseline(ctx: Context) -> None:
    """Closing gives back every descriptor, thread, mapping and shared memory file."""
    for _ in range(3):
        one, other = ctx.local("once"), ctx.peer.side("once")
        scene = ctx.scene(SIZE, one=one, other=other)
        for op in ctx.ops:
            scene.move(op, Ranges.whole(SIZE))
        one.station.reset()
        other.reset()
    deadline = time.monotonic() + 3.0
    while (held := _held(ctx)) and time.monotonic() < deadline:
        time.sleep(0.05)
    ctx.expect(not held, f"after close: {held}")


def _held(ctx: Context) -> list[str]:
    mine, theirs = ctx.process.held(), ctx.peer.call("held")
    return [f"worker: {text}" for text in mine] + [f"peer: {text}" for text in theirs]


@check("TD-05", level="extended", profiles=["KVT-DEVICE"], needs=["op"])
def device_bytes_baseline(ctx: Context) -> None:
    """Closing gives back every byte of device memory and every driver object."""
    target = ctx.a.station.loaded.target
    before = (target.snapshot(), ctx.peer.call("snapshot"))
    if before[0] is None:
        raise NotVerified("the target has no snapshot() hook")
    for _ in range(5):
        scene = ctx.scene(SIZE, one=ctx.local("dev"), other=ctx.peer.side("dev"))
        scene.move(ctx.op, Ranges.whole(SIZE))
        ctx.local("dev").station.reset()
        ctx.peer.side("dev").reset()
    after = (target.snapshot(), ctx.peer.call("snapshot"))
    ctx.expect(after == before, f"device resources went from {before} to {after}")


@check("TD-06", level="core", profiles=["KVT-BASE"], needs=["op"])
def use_after_close(ctx: Context) -> None:
    """Every method of a closed agent raises ``ClosedError``."""
    ctx.scene(SIZE)
    agent = ctx.a.station.agent
    blob = ctx.b.metadata()
    agent.close()
    buffer = np.zeros(64, np.uint8)
    for name, call in (
        ("register", lambda: agent.register(buffer)),
        ("metadata", agent.metadata),
        ("add_peer", lambda: agent.add_peer(blob)),
        ("poll", agent.poll),
        ("notifications", agent.notifications),
    ):
        ctx.raises(ClosedError, call, f"{name} after close")


@check(
    "TD-07", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True,
    noisy=True, timeout_s=60,
)  # fmt: skip
def exit_without_close(ctx: Context) -> None:
    """A process that forgets to close ends by itself within 5 s, with code 0."""
    careless = ctx.spawn("careless")
    scene = ctx.scene(SIZE, one=careless.side(), other=ctx.b)
    scene.move(ctx.op, Ranges.whole(SIZE))
    end = careless.leave(10.0)
    ctx.detail.update(code=end["code"], seconds=end["seconds"])
    ctx.expect(end["code"] is not None, "the process hung at its end and had to be killed")
    ctx.expect(end["code"] == 0, f"it ended with code {end['code']}: {end['words']}")
    ctx.expect(end["seconds"] <= 5.0, f"its end took {end['seconds']} s")


@check("TD-08", level="core", profiles=["KVT-BASE"], needs=["op"])
def quiet_happy_path(ctx: Context) -> None:
    """A run without faults logs no warning and no error, and closes without complaint."""
    scene = ctx.scene(SIZE)
    for op in ctx.ops:
        for reverse in (False, True):
            scene.move(op, Ranges.whole(SIZE), reverse=reverse)
    ctx.a.remove_peer()
    ctx.b.remove_peer()
    for complaint in (ctx.b.close(), ctx.a.close()):
        ctx.expect(not complaint, f"close complained: {complaint}")
    said = [f"worker: {line}" for line in ctx.process.logs()]
    said += [f"peer: {line}" for line in ctx.peer.call("logs")]
    ctx.expect(not said, f"logged on the happy path: {said[:3]}")
