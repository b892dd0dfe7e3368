"""INT: data integrity over many transfers."""

from __future__ import annotations

import time

import numpy as np

from kvtransport.errors import KVTransportError
from kvtransport.events import TransferEvent
from kvtransport_conformance.checks.quiet import post_or_error
from kvtransport_conformance.context import BLANK, Context, Ranges, Scene
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.registry import check

SIZE = 8 << 20
_BATCH = 500


@check("INT-01", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True,
       timeout_s=120)  # fmt: skip
def checksum_random(ctx: Context) -> None:
    """10,000 transfers of random places and sizes leave every byte right."""
    scene = ctx.scene(SIZE)
    total = 0
    for batch in range(-(-ctx.settings.rounds // _BATCH)):
        op = ctx.ops[batch % len(ctx.ops)]
        reverse = bool(batch // 2 % 2)
        total += _random_batch(ctx, scene, op, reverse=reverse)
    ctx.detail.update(transfers=ctx.settings.rounds, mib=total >> 20)


def _random_batch(ctx: Context, scene: Scene, op: str, *, reverse: bool) -> int:
    """Transfers of one to three descriptors to disjoint places, then look at everything."""
    unit = SIZE // (2 * _BATCH) // 64 * 64
    sizes = ctx.rng.integers(1, unit // ctx.align + 1, 2 * _BATCH) * ctx.align
    sizes = np.minimum(sizes, unit)
    at = ctx.rng.permutation(2 * _BATCH) * unit
    source = ctx.rng.permutation(2 * _BATCH) * unit
    whole = Ranges.of(source.tolist(), at.tolist(), sizes.tolist())
    pieces = [
        [scene.piece(op, Ranges.of(whole.source[i : i + 2], whole.at[i : i + 2],
                                   whole.nbytes[i : i + 2]))]
        for i in range(0, 2 * _BATCH, 2)
    ]  # fmt: skip
    initiator = scene.ends(op, reverse=reverse)[0]
    key = scene.back if reverse else scene.key
    result = initiator.rounds(op, pieces, _BATCH, 32, key)
    ctx.expect(result["failure"] is None, f"{op}: {result['failure']}")
    scene.arrived(op, whole, f"{_BATCH} random {op}s", reverse=reverse)
    scene.blank(op, reverse=reverse)
    return whole.total


@check("INT-02", level="core", profiles=["KVT-BASE", "KVT-LAYOUT"], needs=["op"],
       first_release=True, timeout_s=60)  # fmt: skip
def position_coded_pattern(ctx: Context) -> None:
    """Every 8 bytes name their place: blocks of one transfer are never exchanged."""
    count, block = 256, 4096
    scene = ctx.scene(count * block)
    for op in ctx.ops:
        for round_number in range(10):
            source = ctx.rng.permutation(count) * block
            at = ctx.rng.permutation(count) * block
            ranges = Ranges.of(source.tolist(), at.tolist(), [block] * count)
            scene.move(op, ranges)
            scene.arrived(op, ranges, f"{op} {round_number} of {count} permuted blocks")
            scene.blank(op)


@check("INT-03", level="core", profiles=["KVT-BASE"], needs=["op"])
def bit_exact_nan(ctx: Context) -> None:
    """Signalling NaNs and denormals arrive bit for bit: nobody interprets the data."""
    scene = ctx.scene(SIZE)
    pattern = Pattern("nan", 5)
    for op in ctx.ops:
        _, source, sink, _ = scene.ends(op)
        source.fill("src", pattern.wire())
        scene.move(op, Ranges.whole(SIZE))
        want = Expected(BLANK, (Overlay(pattern, (0,), (0,), (SIZE,)),))
        ctx.same(sink, "dst", want, f"{op} of NaN patterns")
        scene.blank(op)


@check(
    "INT-04", level="core", profiles=["KVT-FAULT"], needs=["op"], noisy=True,
    timeout_s=90, why="vllm#45497, vllm#52232: a failed load was dropped instead of reported",
)  # fmt: skip
def failed_transfer_is_flagged(ctx: Context) -> None:
    """Of transfers to a living and a dead peer exactly the right ones are reported failed."""
    # A write that is DONE when its source may be reused says nothing of a dead target.
    local = not ctx.supports("completion") and "read" in ctx.ops
    op = "read" if local else ctx.op
    scene = ctx.scene(1 << 16)
    mortal = ctx.spawn("mortal")
    side = mortal.side()
    for name, wire in (("src", ["coded", 2]), ("dst", ["const", 0xEE])):
        side.alloc(name, 1 << 16, wire)
        side.register(name)
    ctx.a.add_peer(side.metadata(), "mortal")
    mortal.kill()
    doomed = Scene(ctx, ctx.a, side, 1 << 16, "mortal", "peer")
    living: list[int] = []
    dead: list[int] = []
    refused = 0
    for index in range(8):
        ranges = Ranges.of([4096 * index], [4096 * index], [4096])
        living.append(scene.post(op, ranges))
        posted = post_or_error(doomed, op, ranges, 5.0)
        if isinstance(posted, Exception):
            refused += 1
            ctx.expect(isinstance(posted, KVTransportError), f"post raised {posted!r}")
        else:
            dead.append(posted)
    for number in living:
        result = ctx.a.wait(number)
        ctx.expect(result["state"] == "done", f"a transfer to the living peer: {result}")
    for number in dead:
        result = ctx.a.wait(number)
        ctx.expect(result["state"] in {"failed", "quarantined"}, f"to the dead peer: {result}")
        ctx.expect(result["error"] is not None, "a failed transfer carries no error")
    _events_agree(ctx, living, dead)
    scene.arrived(op, Ranges.whole(8 * 4096), "transfers to the living peer")
    ctx.detail.update(refused=refused, failed=len(dead))


def _events_agree(ctx: Context, living: list[int], dead: list[int]) -> None:
    states = {
        event.transfer.transfer_id: event.transfer.state.value
        for event in ctx.a.station.agent.poll()
        if isinstance(event, TransferEvent)
    }
    missing = set(living + dead) - set(states)
    ctx.expect(not missing, f"{len(missing)} ended transfers have no event")
    wrong = [number for number in dead if states[number] == "done"]
    ctx.expect(not wrong, f"{len(wrong)} failed transfers were reported as done")


@check("INT-05", level="extended", profiles=["KVT-SCALE"], needs=["op"], timeout_s=300)
def soak_mixed(ctx: Context) -> None:
    """A mixture of sizes and directions runs for a while: right to the end, nothing grows."""
    scene = ctx.scene(SIZE)
    deadline = time.monotonic() + ctx.settings.soak_s
    batches = 0
    held: list[str] = []
    resident = 0
    while time.monotonic() < deadline or batches < 4:
        op = ctx.ops[batches % len(ctx.ops)]
        _random_batch(ctx, scene, op, reverse=bool(batches // 2 % 2))
        batches += 1
        if batches == 4:
            held, resident = ctx.process.held(), ctx.process.resident()
    grown = ctx.process.resident() - resident
    ctx.detail.update(
        seconds=ctx.settings.soak_s, transfers=batches * _BATCH, grown_mib=round(grown / 2**20, 1)
    )
    ctx.expect(ctx.process.held() == held, f"held {held} first, {ctx.process.held()} at the end")
    ctx.expect(grown < 64 << 20, f"memory grew by {grown >> 20} MiB")
