"""PD: peer death: real SIGKILL and SIGSTOP of real processes."""

from __future__ import annotations

import time
from typing import Any

from kvtransport.errors import KVTransportError, PeerLostError, StaleDescriptorError
from kvtransport_conformance.checks.con import slots
from kvtransport_conformance.checks.md import proxied, use_once
from kvtransport_conformance.checks.quiet import REUSED, post_or_error, stays_as_filled
from kvtransport_conformance.context import Context, NotVerified, Ranges, Scene
from kvtransport_conformance.patterns import Expected
from kvtransport_conformance.registry import check

SIZE = 1 << 16
_FAULT = ["KVT-FAULT"]
DEFAULT_BOUND_S = 30.0


def bound_s(ctx: Context) -> float:
    """Seconds within which a dead peer must be noticed."""
    declared = ctx.caps["detection_bound_s"]
    return DEFAULT_BOUND_S if declared is None else float(declared)


@check(
    "PD-01", level="extended", profiles={"KVT-FAULT": "core"}, needs=["op"],
    covers=["failure_detection"], first_release=True, noisy=True, timeout_s=120,
    why="UCX tells this or not depending on its error-handling mode",
)  # fmt: skip
def target_killed(ctx: Context) -> None:
    """After SIGKILL of the peer, transfers to it end with ``PeerLostError`` within the bound."""
    for op in ctx.ops:
        mortal = ctx.spawn(f"mortal-{op}")
        one, other = ctx.local(f"survivor-{op}"), mortal.side()
        scene = ctx.scene(1 << 22, one=one, other=other)
        scene.move(op, Ranges.whole(1 << 22))
        mortal.kill()
        started = time.monotonic()
        kinds = _use_dead_peer(ctx, scene, op)
        took = time.monotonic() - started
        ctx.detail[op] = f"{kinds[-1] if kinds else 'nothing noticed'} after {took:.2f} s"
        if not ctx.supports("failure_detection"):
            continue
        ctx.expect("PeerLostError" in kinds, f"{op}: the death of the peer was reported as {kinds}")
        limit = bound_s(ctx)
        ctx.expect(took <= limit + 1.0, f"{op}: detection took {took:.1f} s, declared {limit} s")


def _use_dead_peer(ctx: Context, scene: Scene, op: str) -> list[str]:
    """Post until the death is noticed; return the kinds of error met."""
    kinds: list[str] = []
    deadline = time.monotonic() + bound_s(ctx) + 5.0
    while time.monotonic() < deadline and "PeerLostError" not in kinds:
        posted = post_or_error(scene, op, Ranges.whole(1 << 22), bound_s(ctx) + 5.0)
        if isinstance(posted, Exception):
            kinds.append(type(posted).__name__)
            ctx.expect(isinstance(posted, KVTransportError), f"{op} raised {posted!r}")
        else:
            result = scene.one.settle(posted, bound_s(ctx) + 20.0)
            if result["state"] == "done" and op == "write" and not ctx.supports("completion"):
                time.sleep(0.05)
                continue  # its source is free, whatever became of the target
            ctx.expect(result["state"] != "done", f"{op} with a dead peer is DONE")
            ctx.expect(result["error"] is not None, f"{op} with a dead peer: {result}")
            kinds.append(result["error"]["type"])
            if result["state"] == "quarantined":
                break
    return kinds


@check(
    "PD-02", level="extended", profiles={"KVT-FAULT": "core"}, needs=["op"],
    first_release=True, noisy=True, timeout_s=60,
    why="mori#655: a dead reader wedged the owner",
)  # fmt: skip
def initiator_killed(ctx: Context) -> None:
    """After SIGKILL of an initiator its target deregisters, goes on and is not disturbed."""
    mortal = ctx.spawn("mortal")
    scene = ctx.scene(ctx.settings.max_bytes, one=mortal.side(), other=ctx.a, key="peer",
                      back="mortal")  # fmt: skip
    pieces = [[scene.piece(ctx.op, Ranges.whole(ctx.settings.max_bytes))]]
    mortal.side().start("rounds", ctx.op, pieces, 10_000, 4)
    ctx.pause(0.3)
    mortal.kill()
    started = time.monotonic()
    name = "dst" if ctx.op == "write" else "src"
    ctx.pause(0.2)
    ctx.a.deregister(name, drain_s=5.0)
    ctx.detail["reclaimed_s"] = round(time.monotonic() - started, 2)
    ctx.a.fill(name, REUSED.wire())
    ctx.pause(ctx.settings.watch_s)
    ctx.same(ctx.a, name, Expected(REUSED), "memory reclaimed from a dead initiator")
    other = ctx.scene(SIZE, one=ctx.local("second"), other=ctx.b)
    other.move(ctx.op, Ranges.whole(SIZE))
    other.arrived(ctx.op, Ranges.whole(SIZE), "traffic to a living peer")


@check(
    "PD-03", level="extended", profiles={"KVT-FAULT": "core"}, needs=["op"],
    noisy=True, timeout_s=120,
)  # fmt: skip
def target_frozen_then_thawed(ctx: Context) -> None:
    """A frozen peer costs a typed timeout; after it thaws nothing lands in reused memory."""
    for op in ctx.ops:
        frozen = ctx.spawn(f"frozen-{op}")
        one, other = ctx.local(f"patient-{op}"), frozen.side()
        one.open(options={"drain_s": 3.0})
        scene = ctx.scene(1 << 22, one=one, other=other)
        scene.move(op, Ranges.whole(1 << 22))
        scene.blank(op)
        frozen.freeze()
        try:
            posted = post_or_error(scene, op, Ranges.whole(1 << 22), 2.0)
            state = "refused"
            if not isinstance(posted, Exception):
                result = one.settle(posted, 25.0)
                state = result["state"]
                ctx.expect(
                    state in {"done", "failed", "cancelled", "quarantined"},
                    f"{op} with a frozen peer is {state} long after its deadline",
                )
            reusable = op == "read" and state in {"failed", "cancelled"}
            if reusable:
                one.fill("dst", REUSED.wire())
        finally:
            frozen.thaw()
        ctx.detail[op] = state
        ctx.pause(2 * ctx.settings.watch_s)
        if reusable:
            ctx.same(one, "dst", Expected(REUSED), "memory reused after the timeout")
        elif op == "write" and state in {"failed", "cancelled"}:
            stays_as_filled(ctx, other, "after a timed-out write, once its target had thawed")


@check(
    "PD-04", level="extended", profiles={"KVT-FAULT": "core"}, needs=["op"],
    first_release=True, noisy=True, timeout_s=120,
    why="vllm#55471, sglang#33789: replacing one side broke the pair until both restarted",
)  # fmt: skip
def restart_same_name(ctx: Context) -> None:
    """A peer that restarts under its old name works at once; handles of the old one are stale."""
    first = ctx.spawn("phoenix")
    scene = ctx.scene(SIZE, other=first.side())
    scene.move(ctx.op, Ranges.whole(SIZE))
    name = "dst" if ctx.op == "write" else "src"
    ctx.a.keep_region(name)
    stale = scene.piece(ctx.op, Ranges.whole(SIZE), remote=f"~{name}")
    first.kill()
    again = ctx.spawn("phoenix")
    fresh = _populate(again.side())
    ctx.a.add_peer(fresh.metadata(), "reborn")
    ctx.raises(
        (StaleDescriptorError, PeerLostError),
        lambda: ctx.a.move(ctx.op, [stale], "peer"),
        "a handle of the dead incarnation",
    )
    for _ in range(3):
        ctx.a.move(ctx.op, [scene.piece(ctx.op, Ranges.whole(SIZE))], "reborn")
    reborn = Scene(ctx, ctx.a, fresh, SIZE, "reborn", "peer")
    reborn.arrived(ctx.op, Ranges.whole(SIZE), "with the restarted peer")


def _populate(side: Any) -> Any:
    side.alloc("src", SIZE, ["coded", 2])
    side.alloc("dst", SIZE, ["const", 0xEE])
    side.register("src")
    side.register("dst")
    return side


@check(
    "PD-05", level="extended", profiles={"KVT-FAULT": "core"}, needs=["op"],
    first_release=True, noisy=True, timeout_s=120,
)  # fmt: skip
def dead_peer_isolated(ctx: Context) -> None:
    """While one peer is dead and in use, traffic to others keeps half of its rate."""
    mortal = ctx.spawn("mortal")
    scene = ctx.scene(SIZE)
    mortal_side = _populate(mortal.side())
    ctx.a.add_peer(mortal_side.metadata(), "mortal")
    mortal_side.add_peer(ctx.a.metadata())
    pieces = slots(scene, ctx.op, 16, 4096)
    # The machine has other work: the slowest of several is what "before" may count as.
    quiet = [ctx.a.rounds(ctx.op, pieces, 300, 8) for _ in range(3)]
    for result in quiet:
        ctx.expect(result["failure"] is None, f"before any death: {result['failure']}")
    before = max(result["seconds"] for result in quiet)
    ctx.a.move(ctx.op, [scene.piece(ctx.op, Ranges.whole(4096))], "mortal")
    mortal.kill()
    for _ in range(4):
        try:
            ctx.a.post(ctx.op, [scene.piece(ctx.op, Ranges.whole(4096))], "mortal", 10.0)
        except KVTransportError:
            break
    rates = []
    for _ in range(8):
        after = ctx.a.rounds(ctx.op, pieces, 300, 8)
        ctx.expect(after["failure"] is None, f"traffic to a living peer: {after['failure']}")
        rates.append(before / after["seconds"])
        if max(rates) >= 0.5:
            break
    ctx.detail["rate"] = f"{max(rates):.2f} of the rate before"
    ctx.expect(max(rates) >= 0.5, f"the rate to others fell to {max(rates):.2f} of what it was")
    scene.arrived(ctx.op, Ranges.whole(SIZE))


@check(
    "PD-06", level="extended", profiles=_FAULT, needs=["op"], noisy=True,
    timeout_s=120, why="mori#655: one dropped acknowledgement wedged a transfer",
)  # fmt: skip
def one_way_loss(ctx: Context) -> None:
    """When answers vanish on the way, transfers end typed, and others work afterwards."""
    scene = ctx.scene(1 << 20)
    scene.move(ctx.op, Ranges.whole(1 << 20))
    if not ctx.fault("drop_ack"):
        _loss_behind_proxy(ctx, scene)
        return
    try:
        posted = post_or_error(scene, ctx.op, Ranges.whole(1 << 20), 3.0)
        state = "refused"
        if not isinstance(posted, Exception):
            state = ctx.a.settle(posted, 30.0)["state"]
            ctx.expect(
                state in {"failed", "cancelled", "quarantined"},
                f"with every acknowledgement lost the transfer is {state}",
            )
        ctx.detail["under_loss"] = state
    finally:
        ctx.fault("heal")
    after = ctx.scene(SIZE, one=ctx.local("after"), other=ctx.peer.side("after"))
    after.move(ctx.op, Ranges.whole(SIZE))
    after.arrived(ctx.op, Ranges.whole(SIZE), "after the network healed")


def _loss_behind_proxy(ctx: Context, scene: Scene) -> None:
    """The same with a proxy that swallows what the peer answers."""
    piece = scene.piece(ctx.op, Ranges.of([0], [0], [4096]))
    with ctx.detour() as found:
        if found is None:
            raise NotVerified(
                "needs a peer behind a TCP port that its metadata names, --netns (root) on a "
                "network path, or a Target with inject('drop_ack')"
            )
        detour, blob = found
        side = proxied(ctx, "one-way")
        side.add_peer(blob)
        detour.mode = "drop_ack"
        state = use_once(ctx, side, piece)
        ctx.detail["under_loss"] = f"{state}, behind a proxy"
        ctx.expect(
            state in {"failed", "cancelled", "quarantined"} or state.startswith("refused"),
            f"with every acknowledgement lost the transfer is {state}",
        )
        side.station.reset()
    scene.move(ctx.op, Ranges.whole(1 << 20))


@check(
    "PD-07", level="extended", profiles={"KVT-FAULT": "core"}, needs=["op"],
    noisy=True, timeout_s=120,
    why="sglang#33789, nixl#795: the survivor had to be restarted as well",
)  # fmt: skip
def recovers_in_process(ctx: Context) -> None:
    """After a peer died, the same agent works with fresh peers, several times in a row."""
    ctx.a.alloc("src", SIZE, ["coded", 1])
    ctx.a.alloc("dst", SIZE, ["const", 0xEE])
    ctx.a.register("src")
    ctx.a.register("dst")
    for cycle in range(3):
        mortal = ctx.spawn(f"mortal-{cycle}")
        side = _populate(mortal.side())
        key = f"m{cycle}"
        ctx.a.add_peer(side.metadata(), key)
        side.add_peer(ctx.a.metadata())
        scene = Scene(ctx, ctx.a, side, SIZE, key, "peer")
        scene.move(ctx.op, Ranges.whole(SIZE))
        scene.arrived(ctx.op, Ranges.whole(SIZE), f"with fresh peer {cycle}")
        scene.blank(ctx.op)
        mortal.kill()
        posted = post_or_error(scene, ctx.op, Ranges.whole(SIZE), 5.0)
        if not isinstance(posted, Exception):
            ctx.a.settle(posted, 30.0)
