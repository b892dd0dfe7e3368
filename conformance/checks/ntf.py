"""NTF: notifications: after their data, once, to the right reader, never for a failure."""

from __future__ import annotations

from collections import Counter

from kvtransport.errors import UnsupportedError
from kvtransport_conformance.checks.quiet import ended_state
from kvtransport_conformance.context import BLANK, Context, Ranges, Scene
from kvtransport_conformance.patterns import Pattern
from kvtransport_conformance.registry import check

_NOTIFY = {"KVT-NOTIFY": "core"}
_SLOTS = 64
_SIZES = (64, 4096, 65_536)
"""Small ones could overtake large ones."""


@check("NTF-01", level="extended", profiles=_NOTIFY, needs=["notify", "op"], first_release=True)
def payload_roundtrip(ctx: Context) -> None:
    """Payloads of 0 to the maximum arrive byte for byte, NUL and non-UTF-8 included."""
    scene = ctx.scene(4096)
    limit = int(ctx.caps["max_notify_bytes"])
    payloads = [b"", b"\0", b"\xff\xfe\0\xff", bytes(range(256)) * 2, ctx.rng.bytes(limit)]
    payloads = [payload for payload in payloads if len(payload) <= limit]
    for op in ctx.ops:
        for payload in payloads:
            scene.move(op, Ranges.whole(4096), notify=payload)
            got = ctx.b.await_notifications(1, 5.0)
            ctx.expect(
                [entry[1] for entry in got] == [payload],
                f"{op} with a payload of {len(payload)} bytes delivered "
                f"{[len(entry[1]) for entry in got]} bytes",
            )


@check(
    "NTF-02", level="extended", profiles=_NOTIFY,
    needs=["notify", "notify_after_data", "ops.write"],
    covers=["notify_after_data"], first_release=True, timeout_s=120,
    why="EFA's SRD is unordered, so a message can overtake the data it announces",
)  # fmt: skip
def after_data(ctx: Context) -> None:
    """When a notification is seen, every byte of its transfer is visible: 10,000 rounds."""
    slot = max(_SIZES)
    scene = ctx.scene(_SLOTS * slot)
    rounds = ctx.settings.rounds
    for batch in range(-(-rounds // _SLOTS)):
        _after_data_batch(ctx, scene, batch, slot)
    ctx.detail["rounds"] = rounds


def _after_data_batch(ctx: Context, scene: Scene, batch: int, slot: int) -> None:
    ctx.b.fill("dst", BLANK.wire())
    waiting = ctx.b.start("verify_on_notice", "dst", Pattern("coded", 1).wire(), _SLOTS, 20.0)
    numbers = []
    for index in range(_SLOTS):
        size = _SIZES[(batch + index) % 3]
        source = ((index * 7 + batch) % _SLOTS) * slot
        # Two descriptors that cannot merge: the message must follow both.
        half = size // 2
        ranges = Ranges.of([source, source + half], [index * slot, index * slot + slot - half],
                           [half, half])  # fmt: skip
        payload = b"%d %d %d" % (index * slot, source, half)
        numbers.append(scene.post("write", ranges, notify=payload))
    for number in numbers:
        ctx.a.wait(number)
    found = waiting.result()
    ctx.expect(not found["early"], f"batch {batch}: {found['early']} came before its data")
    ctx.expect(found["seen"] == _SLOTS, f"{found['seen']} of {_SLOTS} notifications came")


@check("NTF-03", level="extended", profiles=_NOTIFY, needs=["notify", "op"], first_release=True)
def notified_exactly_once(ctx: Context) -> None:
    """Every notification is delivered once: none lost, none doubled."""
    scene = ctx.scene(1 << 16)
    count = 500
    pieces = [[scene.piece(ctx.op, Ranges.of([64 * n], [64 * n], [64]))] for n in range(100)]
    result = ctx.a.rounds(ctx.op, pieces, count, 32, notify=True)
    ctx.expect(result["failure"] is None, f"a transfer failed: {result['failure']}")
    got = ctx.b.await_notifications(count, 10.0)
    got += ctx.b.await_notifications(1, 0.3)
    _same_messages(ctx, got, [b"%d" % number for number in range(count)])


def _same_messages(ctx: Context, got: list[list[object]], want: list[bytes]) -> None:
    seen = Counter(entry[1] for entry in got)
    twice = [payload for payload, times in seen.items() if times > 1]
    lost = set(want) - set(seen)
    ctx.expect(not twice, f"{len(twice)} notifications were delivered more than once")
    ctx.expect(not lost, f"{len(lost)} of {len(want)} notifications were lost")
    ctx.expect(set(seen) == set(want), "a notification arrived that nobody sent")


@check(
    "NTF-04", level="extended", profiles=_NOTIFY, needs=["notify", "op"], first_release=True,
    noisy=True,
)  # fmt: skip
def none_on_failure(ctx: Context) -> None:
    """A transfer that was refused, cancelled or failed never yields its notification."""
    size = ctx.settings.max_bytes
    scene = ctx.scene(size)
    ctx.detail["outcomes"] = []
    known = _bad_transfer(ctx)
    if ctx.supports("cancel"):
        for _ in range(4):
            number = catch_in_flight_notified(scene, ctx.op, size)
            if number is None:
                continue
            ctx.a.cancel(number)
            ctx.detail["outcomes"].append(ended_state(ctx, number, 10.0))
            known.append(ctx.detail["outcomes"][-1] == "done")
    got = [entry[1] for entry in ctx.b.await_notifications(sum(known) + 1, 1.0)]
    ctx.expect(
        got.count(b"bad") <= sum(known),
        f"{got.count(b'bad')} notifications of transfers came, {sum(known)} succeeded",
    )


def _bad_transfer(ctx: Context) -> list[bool]:
    """Write to a region that does not exist; say whether the backend called it a success."""
    local = ctx.a.station.regions["src" if ctx.op == "write" else "dst"].region_id
    found = ctx.a.raw_move(ctx.op, local, 999_999, [[0], [0], [64]], notify=b"bad", patience_s=3.0)
    ctx.expect(found["outcome"] != "done", "a transfer with a region nobody has was a success")
    return []


def catch_in_flight_notified(scene: Scene, op: str, size: int) -> int | None:
    """As ``catch_in_flight``, with a notification."""
    half = size // 2
    ranges = Ranges.of([0, half], [half, 0], [half, half])
    number = scene.post(op, ranges, notify=b"bad")
    if scene.one.state(number)["state"] == "in_flight":
        return number
    scene.one.wait(number)
    scene.other.notifications()
    return None


@check("NTF-05", level="extended", profiles=_NOTIFY, needs=["notify", "op"])
def oversize_typed(ctx: Context) -> None:
    """One byte more than declared is refused with a typed error, and nothing is sent."""
    scene = ctx.scene(4096)
    limit = int(ctx.caps["max_notify_bytes"])
    ctx.raises(
        UnsupportedError,
        lambda: scene.move(ctx.op, Ranges.whole(4096), notify=bytes(limit + 1)),
        f"a notification of {limit + 1} bytes",
    )
    scene.untouched(ctx.op)
    ctx.expect(not ctx.b.notifications(), "the refused notification was delivered")


@check("NTF-06", level="extended", profiles=_NOTIFY, needs=["notify", "op"])
def sender_attribution(ctx: Context) -> None:
    """A notification is delivered under the agent that sent it, with several peers."""
    other = ctx.spawn("third").side()
    ctx.scene(4096)
    ctx.scene(4096, one=ctx.local("second"), other=other)
    ctx.a.register("extra", "src")
    ctx.connect(ctx.a, other, "third", "first")
    ctx.connect(ctx.a, ctx.b)
    for sender, key, payload in ((ctx.b, "peer", b"from b"), (other, "first", b"from third")):
        sender.notify(payload, key)
    got = sorted((name, payload) for name, payload in ctx.a.await_notifications(2, 5.0))
    want = sorted([("peer-main", b"from b"), ("third-main", b"from third")])
    ctx.expect(got == want, f"senders and payloads were {got}, not {want}")


@check("NTF-07", level="extended", profiles=_NOTIFY, needs=["notify"])
def standalone(ctx: Context) -> None:
    """A notification without data arrives like any other."""
    ctx.scene(4096)
    ctx.a.notify(b"alone")
    got = ctx.b.await_notifications(1, 5.0)
    ctx.expect([entry[1] for entry in got] == [b"alone"], f"received {got}")


@check("NTF-08", level="extended", profiles=_NOTIFY, needs=["notify"], covers=["ordering"])
def order_as_declared(ctx: Context) -> None:
    """Notifications of one peer keep their order where ordering is declared."""
    ctx.scene(4096)
    count = 300
    sent = ctx.a.burst(count)
    ctx.expect(sent["error"] is None, f"sending stopped: {sent['error']}")
    got = ctx.b.await_notifications(count, 10.0)
    want = [b"%d" % number for number in range(count)]
    if ctx.supports("ordering"):
        ctx.expect([entry[1] for entry in got] == want, "declared per_peer, but out of order")
    else:
        _same_messages(ctx, got, want)


@check(
    "NTF-09", level="extended", profiles=["KVT-NOTIFY", "KVT-SCALE"], needs=["notify"],
    timeout_s=90, noisy=True,
)  # fmt: skip
def slow_consumer(ctx: Context) -> None:
    """10,000 unread notifications: bounded memory or typed backpressure, and none is lost."""
    ctx.scene(4096)
    ctx.b.set_polling(False)
    before = ctx.peer.call("resident")
    count = ctx.settings.rounds
    sent = ctx.a.burst(count)
    grown = ctx.peer.call("resident") - before
    ctx.detail.update(sent=sent["sent"], grown_mib=round(grown / 2**20, 1))
    ctx.expect(grown < 64 << 20, f"{sent['sent']} unread messages took {grown >> 20} MiB")
    if sent["error"] is not None:
        kind = sent["error"]["type"]
        ctx.expect(
            kind in {"BackpressureError", "TransferTimeoutError"}, f"sending stopped with {kind}"
        )
    ctx.b.set_polling(True)
    got = ctx.b.await_notifications(sent["sent"], 30.0)
    lost = {b"%d" % number for number in range(sent["sent"])} - {entry[1] for entry in got}
    ctx.expect(not lost, f"{len(lost)} of {sent['sent']} notifications were lost")


@check(
    "NTF-10", level="extended", profiles=["KVT-NOTIFY", "KVT-FAULT"], needs=["notify", "op"],
    noisy=True, why="mori#655: one lost message wedged a transfer for ever",
)  # fmt: skip
def lost_notify_is_bounded(ctx: Context) -> None:
    """When the acknowledgement is lost, the transfer ends typed at its deadline."""
    ctx.a.open(faults={"drop_rate": 1.0}, options={"drain_s": 0.5})
    scene = ctx.scene(4096)
    number = scene.post(ctx.op, Ranges.whole(4096), notify=b"lost", deadline_s=0.5)
    result = ctx.a.wait(number)
    ctx.expect(
        result["state"] == "quarantined" and result["raised"]["type"] == "TransferTimeoutError",
        f"without an acknowledgement the transfer ended as {result}",
    )
