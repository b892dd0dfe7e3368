"""CAN: cancelling: bounded, quiet afterwards, and harmless to everything else."""

from __future__ import annotations

from collections import Counter

from kvtransport.errors import UnsupportedError
from kvtransport_conformance.checks.quiet import catch_in_flight, ended_state, stays_as_filled
from kvtransport_conformance.context import Context, NotVerified, Ranges
from kvtransport_conformance.registry import check

BOUND_S = 10.0


@check(
    "CAN-01", level="extended", profiles=["KVT-FAULT"], needs=["op", "cancel"],
    covers=["cancel"], first_release=True, noisy=True,
)  # fmt: skip
def terminal_within_bound(ctx: Context) -> None:
    """A cancelled transfer is terminal within 10 s, and cancelled ones did not all finish."""
    size = ctx.settings.max_bytes
    scene = ctx.scene(size)
    ends: Counter[str] = Counter()
    for op in ctx.ops:
        for _ in range(5):
            number = catch_in_flight(scene, op, size)
            if number is None:
                continue
            ctx.a.cancel(number)
            state = ended_state(ctx, number, BOUND_S)
            ctx.expect(state != "quarantined", "a cancelled transfer had to be quarantined")
            ends[state] += 1
    ctx.detail.update(ends)
    if not ends:
        raise NotVerified("every transfer had ended before it could be cancelled")
    if ctx.caps["cancel"] == "hard":
        ctx.expect(ends["cancelled"], f"cancel is declared 'hard' and stopped nothing: {ends}")


@check(
    "CAN-02", level="extended", profiles=["KVT-FAULT"], needs=["op", "cancel"],
    covers=["cancel"], first_release=True, noisy=True, timeout_s=60,
    why="vllm#32255, sglang#35049: an aborted transfer wrote into its blocks' next owner",
)  # fmt: skip
def silence_after_terminal(ctx: Context) -> None:
    """After a cancelled transfer is terminal its destination stays untouched for 2 s."""
    size = ctx.settings.max_bytes
    scene = ctx.scene(size)
    watched = 0
    for op in ctx.ops:
        for _ in range(6):
            number = catch_in_flight(scene, op, size)
            if number is None:
                continue
            ctx.a.cancel(number)
            state = ended_state(ctx, number, BOUND_S)
            if state in {"cancelled", "failed"}:
                stays_as_filled(ctx, scene.ends(op)[2], f"after a {op} was {state}", 2)
                watched += 1
                break
    ctx.detail["watched"] = watched
    if not watched:
        raise NotVerified("no transfer was caught in flight and ended early")


@check("CAN-03", level="core", profiles=["KVT-FAULT"], needs=["op"])
def cancel_done_is_noop(ctx: Context) -> None:
    """Cancelling a finished transfer changes nothing and raises nothing."""
    scene = ctx.scene(1 << 16)
    number = scene.post(ctx.op, Ranges.whole(1 << 16))
    ctx.a.wait(number)
    ctx.a.cancel(number)
    ctx.pause(0.1)
    ctx.expect(ctx.a.state(number)["state"] == "done", "a finished transfer changed its state")
    scene.arrived(ctx.op, Ranges.whole(1 << 16))


@check(
    "CAN-04", level="extended", profiles=["KVT-FAULT"], needs=["op", "cancel"],
    covers=["cancel"], noisy=True,
)  # fmt: skip
def siblings_unaffected(ctx: Context) -> None:
    """Cancelling one of several transfers leaves the others to finish correctly."""
    size = ctx.settings.max_bytes
    half = size // 2
    scene = ctx.scene(size)
    part = half // 8
    starts = [part * number for number in range(8)]
    victim = scene.post(ctx.op, Ranges.of(starts, list(reversed(starts)), [part] * 8))
    others = [scene.post(ctx.op, Ranges.of([half + at], [half + at], [part])) for at in starts]
    ctx.a.cancel(victim)
    ctx.detail["victim"] = ended_state(ctx, victim, BOUND_S)
    for number in others:
        result = ctx.a.wait(number)
        ctx.expect(result["state"] == "done", f"a sibling of a cancelled transfer: {result}")
    sink, pattern = scene.ends(ctx.op)[2:]
    for at in (half, size - 64):
        found = sink.peek("dst", at, 64)
        ctx.expect(found == pattern.data(at, 64).tobytes(), f"a sibling's byte {at} is wrong")


@check("CAN-05", level="core", profiles=["KVT-FAULT"], needs=["op"], first_release=True)
def unsupported_cancel(ctx: Context) -> None:
    """Where cancel is absent it raises ``UnsupportedError`` and the transfer goes on."""
    if ctx.supports("cancel"):
        ctx.a.open(narrow={"cancel": "none"}, faults={"hold_completions_s": 0.3})
    else:
        ctx.a.open(faults={"hold_completions_s": 0.3})
    scene = ctx.scene(1 << 16)
    number = scene.post(ctx.op, Ranges.whole(1 << 16))
    ctx.raises(UnsupportedError, lambda: ctx.a.cancel(number), "cancel, declared 'none'")
    result = ctx.a.wait(number)
    ctx.expect(result["state"] == "done", f"after the refused cancel: {result}")
    scene.arrived(ctx.op, Ranges.whole(1 << 16))


@check("CAN-06", level="core", profiles=["KVT-FAULT"], needs=["op"], noisy=True)
def cancel_before_post(ctx: Context) -> None:
    """Parts that are not posted yet when a transfer ends early are never posted."""
    ctx.a.open(
        narrow={"max_in_flight": 1, "max_descriptors": 1}, faults={"hold_completions_s": 0.2}
    )
    scene = ctx.scene(1 << 16)
    starts = [4096 * number for number in range(8)]
    number = scene.post(ctx.op, Ranges.of(starts, list(reversed(starts)), [64] * 8))
    if ctx.supports("cancel"):
        ctx.a.cancel(number)
    else:
        ctx.a.wait(number, 0.0)
    state = ended_state(ctx, number, BOUND_S)
    ctx.expect(state in {"cancelled", "failed"}, f"seven of eight parts were dropped: {state}")
    ctx.pause(0.3)
    posted = len(ctx.a.station.tap.posted)
    ctx.expect(posted == 1, f"{posted} of 8 parts were posted although the transfer had ended")
