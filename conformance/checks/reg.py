"""REG: registering and deregistering memory."""

from __future__ import annotations

import gc
import time
from functools import partial

import numpy as np

from kvtransport.errors import (
    DescriptorError,
    KVTransportError,
    RegionBusyError,
    RegistrationError,
    RegistrationLimitError,
    UnsupportedError,
)
from kvtransport_conformance.context import BLANK, LATE_S, Context, NotVerified, Ranges
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check
from kvtransport_conformance.sides import Side

SIZE = 1 << 16


@check("REG-01", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def register_roundtrip(ctx: Context) -> None:
    """A region can be registered, used and deregistered; a second deregister raises."""
    scene = ctx.scene(SIZE)
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE))
    region = ctx.a.station.regions["src"]
    ctx.a.deregister("src", drain_s=1.0)
    ctx.raises(
        KVTransportError, lambda: ctx.a.station.agent.deregister(region), "a second deregister"
    )
    ctx.expect(ctx.a.held_regions() == 1, "the backend still holds the deregistered region")


@check("REG-02", level="core", profiles=["KVT-BASE"], first_release=True)
def zero_length_rejected(ctx: Context) -> None:
    """Registering nothing is a typed error and leaves nothing registered."""
    agent = ctx.a.station.agent
    ctx.raises(
        RegistrationError, lambda: agent.register(np.empty(0, np.uint8)), "a buffer of 0 bytes"
    )
    ctx.expect(ctx.a.held_regions() == 0, "the backend holds a region after the refusal")


@check("REG-03", level="core", profiles=["KVT-BASE"], needs=["op"])
def overlapping_regions(ctx: Context) -> None:
    """Two overlapping regions both work, or the second is refused; bytes never mix."""
    scene = ctx.scene(SIZE)
    half = SIZE // 2
    try:
        ctx.a.register("half", "src", nbytes=half)
    except RegistrationError:
        scene.move(ctx.op, Ranges.whole(SIZE))
    else:
        ctx.connect(ctx.a, ctx.b)
        for name, at in (("half", 0), ("src", half)):
            piece = [name, "dst", [at], [at], [half]]
            if ctx.op == "read":
                _overlap_read(ctx)
                return
            ctx.a.move(ctx.op, [piece])
    scene.arrived(ctx.op, Ranges.whole(SIZE))


def _overlap_read(ctx: Context) -> None:
    half = SIZE // 2
    ctx.a.register("sink", "dst", nbytes=half)
    ctx.a.move("read", [["sink", "src", [0], [0], [half]]])
    ctx.a.move("read", [["dst", "src", [half], [half], [half]]])
    want = Expected(BLANK, (Overlay(Pattern("coded", 2), (0,), (0,), (SIZE,)),))
    ctx.same(ctx.a, "dst", want, "destination of reads into overlapping regions")


@check("REG-04", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def same_buffer_twice(ctx: Context) -> None:
    """One buffer registered twice has two ids; dropping one keeps the other usable."""
    scene = ctx.scene(SIZE)
    first = ctx.a.station.regions["src"].region_id
    second = ctx.a.register("again", "src")[0]
    ctx.expect(first != second, f"both registrations got region id {first}")
    ctx.a.deregister("again")
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), "after one of two registrations was dropped")


@check("REG-05", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def odd_base_and_length(ctx: Context) -> None:
    """Regions of 1, 63 and 4097 bytes at unaligned addresses work, or ``min_align`` says no."""
    for number, (size, skip) in enumerate([(1, 0), (63, 0), (63, 1), (4097, 0), (4097, 13)]):
        one, other = ctx.local(f"odd-{number}"), ctx.peer.side(f"odd-{number}")
        if ctx.align > 1 and (size % ctx.align or skip % ctx.align):
            one.alloc("src", size, BLANK.wire(), skip=skip)
            if skip % ctx.align:
                register = partial(one.register, "src")
                ctx.raises(RegistrationError, register, f"base offset {skip}")
            continue
        scene = ctx.scene(size, one=one, other=other, skip=skip)
        scene.move(ctx.op, Ranges.whole(size))
        scene.arrived(ctx.op, Ranges.whole(size), f"a region of {size} bytes, base offset {skip}")
        one.close()
        other.close()


@check(
    "REG-06", level="core", profiles=["KVT-BASE"], first_release=True,
    why="nixl#1672: a failed batch left its first regions registered",
)  # fmt: skip
def partial_batch_rolls_back(ctx: Context) -> None:
    """One bad buffer in a batch leaves no region behind, whatever its place."""
    agent = ctx.a.station.agent
    good = [ctx.a.station.loaded.kit().alloc(4096) for _ in range(4)]
    for bad in range(5):
        batch = {f"r{number}": buffer for number, buffer in enumerate(good)}
        names = list(batch)
        names.insert(bad, "empty")
        buffers = {name: batch.get(name, np.empty(0, np.uint8)) for name in names}
        kit = ctx.a.station.loaded.kit()
        ctx.raises(
            RegistrationError,
            partial(agent.register_many, buffers, kind=kit.kind, device=kit.device),
            f"a batch whose buffer {bad} is empty",
        )
        held = ctx.a.held_regions()
        ctx.expect(held == 0, f"{held} regions stayed after buffer {bad} of a batch was refused")


@check(
    "REG-07", level="core", profiles=["KVT-BASE", "KVT-FAULT"], needs=["op"], first_release=True,
    noisy=True, why="pegaflow#403: memory was unregistered under a running transfer",
)  # fmt: skip
def deregister_in_flight(ctx: Context) -> None:
    """Deregistering a busy region raises ``RegionBusyError`` or drains; nothing lands later."""
    size = ctx.settings.max_bytes
    scene = ctx.scene(size)
    local = "src" if ctx.op == "write" else "dst"
    busy = drained = 0
    for _ in range(10):
        number = scene.post(ctx.op, Ranges.whole(size))
        if ctx.a.state(number)["state"] == "in_flight":
            try:
                ctx.a.deregister(local)
            except RegionBusyError:
                busy += 1
            else:
                _silent_after(ctx, scene.ends(ctx.op)[2])
                drained += 1
                ctx.a.register(local)
                ctx.connect(ctx.a, ctx.b)
        ctx.a.wait(number)
    ctx.detail.update(busy=busy, drained=drained)


def _silent_after(ctx: Context, sink: Side) -> None:
    """The destination does not change any more."""
    before = sink.digest("dst")
    ctx.pause(ctx.settings.watch_s / 2)
    ctx.expect(sink.digest("dst") == before, "bytes landed after deregister had returned")


@check("REG-08", level="core", profiles=["KVT-BASE"], needs=["op"])
def region_owns_buffer(ctx: Context) -> None:
    """A registered buffer stays valid although its owner dropped every reference."""
    scene = ctx.scene(SIZE)
    local = "src" if ctx.op == "write" else "dst"
    if ctx.op == "write":
        ctx.a.forget("src")
    else:
        ctx.b.forget("src")
    gc.collect()
    # Fresh allocations take over memory that was let go too early.
    scribble = [np.full(SIZE, 0x5A, np.uint8) for _ in range(64)]
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), f"after the owner of {local!r} dropped it")
    del scribble


@check("REG-09", level="extended", profiles=["KVT-BASE"], needs=["op"])
def limits_are_typed(ctx: Context) -> None:
    """One region more than allowed is ``RegistrationLimitError``; old regions still work."""
    declared = ctx.caps["max_regions"]
    if declared is None or declared > 4096:
        ctx.a.open(narrow={"max_regions": 2})
        ctx.detail["limit"] = "narrowed to 2"
        allowed = 2
    else:
        ctx.detail["limit"] = allowed = declared
    scene = ctx.scene(SIZE)
    for number in range(allowed - 2):
        ctx.a.register(f"fill-{number}", "src")
    ctx.raises(
        RegistrationLimitError, lambda: ctx.a.register("over", "src"), f"region {allowed + 1}"
    )
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), "an old region after the limit was hit")


@check("REG-10", level="core", profiles=["KVT-BASE"], needs=["op"])
def readonly_target_refused(ctx: Context) -> None:
    """A read-only buffer cannot become a write target, locally or for peers."""
    ctx.a.open()
    frozen = np.zeros(SIZE, np.uint8)
    frozen.flags.writeable = False
    agent = ctx.a.station.agent
    ctx.raises(RegistrationError, lambda: agent.register(frozen, access="rw"), "a read-only buffer")
    region = agent.register(frozen, name="frozen", access="r")
    ctx.a.station.regions["frozen"] = region
    scene = ctx.scene(SIZE)
    if "read" in ctx.ops:
        piece = ["frozen", "src", [0], [0], [SIZE]]
        ctx.raises(DescriptorError, lambda: ctx.a.move("read", [piece]), "a read into it")
    if "write" in ctx.ops:
        piece = ["src", "frozen", [0], [0], [SIZE]]
        ctx.raises(DescriptorError, lambda: ctx.b.move("write", [piece]), "a peer's write to it")
    ctx.expect(not frozen.any(), "the read-only buffer was changed")
    scene.move(ctx.op, Ranges.whole(SIZE))


@check("REG-11", level="extended", profiles=["KVT-BASE"])
def wrong_kind_refused(ctx: Context) -> None:
    """Host memory declared as a device's, or as a kind nobody has, is refused."""
    kinds = {kind for pair in ctx.caps["memory"] for kind in pair} - {"host"}
    agent = ctx.a.station.agent
    buffer = np.zeros(SIZE, np.uint8)
    ctx.raises(
        (UnsupportedError, RegistrationError),
        lambda: agent.register(buffer, kind="no-such-kind"),
        "a kind that the backend does not declare",
    )
    if kinds and any(kit.kind in kinds and kit.device_info().get("driver")
                     for kit in ctx.a.station.loaded.target.memory):  # fmt: skip
        kind = min(kinds)
        ctx.raises(
            (UnsupportedError, RegistrationError),
            lambda: agent.register(buffer, kind=kind),
            f"host memory declared as {kind}",
        )
    ctx.expect(ctx.a.held_regions() == 0, "the backend holds a region after the refusal")


@check(
    "REG-12", level="extended", profiles=["KVT-BASE"], needs=["op"], timeout_s=60,
    why="Mooncake keeps several tests for regions above 4 GiB",
)  # fmt: skip
def region_over_4gib(ctx: Context) -> None:
    """Offsets beyond 2^32 reach the right bytes."""
    limit = ctx.caps["max_region_bytes"]
    size = (1 << 32) + (1 << 20)
    if limit is not None and limit < size:
        raise NotVerified(f"max_region_bytes is {limit}")
    if ctx.a.station.loaded.kit().kind != "host":
        raise NotVerified("only done on host memory, where untouched pages cost nothing")
    region = np.zeros(size, np.uint8)  # untouched pages take no memory
    agent = ctx.a.station.agent
    ctx.a.station.regions["big"] = agent.register(region, name="big")
    scene = ctx.scene(SIZE)
    far = (1 << 32) + 4096
    pattern = Pattern("coded", 2)
    if "write" in ctx.ops:
        ctx.b.move("write", [["src", "big", [0], [far], [SIZE]]])
    else:
        ctx.a.move("read", [["big", "src", [far], [0], [SIZE]]])
    there = region[far : far + SIZE]
    until = time.monotonic() + (0.0 if ctx.supports("completion") else LATE_S)
    while not np.array_equal(there, pattern.data(0, SIZE)) and time.monotonic() < until:
        time.sleep(0.01)
    ctx.expect(np.array_equal(there, pattern.data(0, SIZE)), f"data is not at offset {far}")
    wrapped = region[4096 : 4096 + SIZE]
    ctx.expect(not wrapped.any(), f"data landed at offset {far} modulo 2^32")
    if "read" in ctx.ops:
        ctx.b.move("read", [["dst", "big", [0], [far], [SIZE]]])
        want = Expected(BLANK, (Overlay(pattern, (0,), (0,), (SIZE,)),))
        ctx.same(ctx.b, "dst", want, f"read back from offset {far}")
    del scene
