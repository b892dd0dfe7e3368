"""SEC: bounds and security, as the *target* enforces them."""

from __future__ import annotations

import base64
from functools import partial

from kvtransport.errors import DescriptorError, OutOfBoundsError
from kvtransport_conformance.context import BLANK, Context, NotSupported, NotVerified, Ranges
from kvtransport_conformance.listeners import is_loopback
from kvtransport_conformance.patterns import Expected, Pattern
from kvtransport_conformance.registry import check

SIZE = 1 << 16
_SECURE = {"KVT-SECURE": "core"}
SECRET = Pattern("coded", 77)
"""What a region's neighbour holds: nobody outside may see or change it."""


@check("SEC-01", level="core", profiles=["KVT-BASE", "KVT-SECURE"], needs=["op"],
       first_release=True)  # fmt: skip
def local_bounds(ctx: Context) -> None:
    """Ranges beyond a region, also by wrapping at 2^64, are refused before anything is posted."""
    scene = ctx.scene(SIZE)
    local, remote = ("src", "dst") if ctx.op == "write" else ("dst", "src")
    for low, far, size in (
        (SIZE, 0, 1), (0, SIZE, 1), (SIZE - 1, 0, 2), (0, SIZE - 1, 2), (0, 0, SIZE + 1),
        ((1 << 63) - 1, 0, 64), (0, (1 << 64) - 64, 128), ((1 << 64) - 64, 0, 128), (-64, 0, 64),
    ):  # fmt: skip
        ctx.raises(
            (OutOfBoundsError, DescriptorError),
            partial(ctx.a.move, ctx.op, [[local, remote, [low], [far], [size]]]),
            f"local offset {low}, remote offset {far}, {size} bytes",
        )
    ctx.expect(not ctx.a.station.tap.attempts, "a refused transfer reached the backend")
    scene.untouched(ctx.op)


def fenced(ctx: Context, access: str = "rw") -> int:
    """The peer registers the first half of a buffer; the other half is nobody's business."""
    ctx.b.alloc("fenced", 2 * SIZE, SECRET.wire())
    region: list[int] = ctx.b.register("fenced", access=access, nbytes=SIZE)
    # Twice the size: a forged length must be refused by the target, not for lack of room here.
    for name, pattern in (("src", Pattern("coded", 1)), ("dst", BLANK)):
        ctx.a.alloc(name, 2 * SIZE, pattern.wire())
        ctx.a.register(name)
    ctx.connect(ctx.a, ctx.b)
    return region[0]


def forged(ctx: Context, op: str, region: int, offset: int, nbytes: int = 64) -> None:
    """Post descriptors that the core never saw; nothing may be read or written by them."""
    name = "src" if op == "write" else "dst"
    local = ctx.a.station.regions[name].region_id
    found = ctx.a.raw_move(op, local, region, [[0], [offset], [nbytes]])
    ctx.expect(
        found["outcome"] in {"refused", "failed"},
        f"a forged {op} of {nbytes} bytes at {offset} of region {region} ended {found['outcome']}",
    )
    error = found["error"]
    ctx.expect(error and error["ours"], f"the refusal is not of the library's tree: {error}")
    ctx.same(ctx.b, "fenced", Expected(SECRET), f"the target's memory after a forged {op}")
    ctx.same(ctx.a, "dst", Expected(BLANK), f"the forger's memory after a forged {op}")


@check(
    "SEC-02", level="extended", profiles=_SECURE, needs=["op", "target_enforces.bounds"],
    covers=["target_enforces.bounds"], noisy=True,
    why="vllm#52234: out-of-range ids gave garbage with HTTP 200",
)  # fmt: skip
def remote_bounds_enforced_by_target(ctx: Context) -> None:
    """Descriptors beyond the target's region, forged past the core, reach nothing."""
    region = fenced(ctx)
    for op in ctx.ops:
        for offset, nbytes in (
            (SIZE, 64), (SIZE - 32, 64), (SIZE + 4096, 64), ((1 << 63) + 64, 64),
            ((1 << 64) - 32, 64), (0, SIZE + 64),
        ):  # fmt: skip
            forged(ctx, op, region, offset, nbytes)


@check(
    "SEC-03", level="extended", profiles=_SECURE, needs=["op", "target_enforces.bounds"],
    covers=["target_enforces.bounds"], noisy=True,
)  # fmt: skip
def unregistered_unreachable(ctx: Context) -> None:
    """Region ids that the target never gave out reach nothing."""
    region = fenced(ctx)
    for op in ctx.ops:
        for number in (region + 1, 0, 999_999, (1 << 62)):
            forged(ctx, op, number, 0)


@check(
    "SEC-04", level="extended", profiles=_SECURE, needs=["op", "target_enforces.access"],
    covers=["target_enforces.access"], noisy=True,
)  # fmt: skip
def access_flags(ctx: Context) -> None:
    """A region that peers may only read cannot be written, and the other way round."""
    for op in ctx.ops:
        region = fenced(ctx, "r" if op == "write" else "w")
        forged(ctx, op, region, 0)
        ctx.b.reset()
        ctx.a.station.reset()


@check(
    "SEC-05", level="extended", profiles=_SECURE, needs=["op", "target_enforces.stale_key"],
    covers=["target_enforces.stale_key"], first_release=True, noisy=True,
    why="vllm#52234: a stale handle returned the previous prompt's answer",
)  # fmt: skip
def deregistered_unreachable(ctx: Context) -> None:
    """Metadata of a region that was deregistered since reaches nothing, reused or not."""
    region = fenced(ctx)
    name = "src" if ctx.op == "write" else "dst"
    local = ctx.a.station.regions[name].region_id
    warm = ctx.a.raw_move(ctx.op, local, region, [[0], [0], [64]])
    ctx.expect(warm["outcome"] == "done", f"before deregistration: {warm}")
    ctx.a.fill("dst", BLANK.wire())
    ctx.b.deregister("fenced")
    ctx.b.fill("fenced", SECRET.wire())
    for op in ctx.ops:
        forged(ctx, op, region, 0)
    ctx.b.register("fenced", nbytes=SIZE)
    for op in ctx.ops:
        forged(ctx, op, region, 0)


@check(
    "SEC-06", level="extended", profiles=_SECURE, needs=["op", "target_enforces.bounds"],
    covers=["target_enforces.bounds"], noisy=True,
)  # fmt: skip
def wrong_peer_refused(ctx: Context) -> None:
    """A region id of one peer means nothing at another."""
    region = fenced(ctx)
    other = ctx.peer.side("other")
    other.alloc("only", SIZE, SECRET.wire())
    for number in range(region + 3):
        other.alloc(f"spare-{number}", 4096, SECRET.wire())
        other.register(f"spare-{number}")
    last = other.register("only")[0]
    ctx.a.add_peer(other.metadata(), "other")
    ctx.expect(last > region, "the test needs an id that the first peer does not have")
    for op in ctx.ops:
        forged(ctx, op, last, 0)


@check("SEC-07", level="core", profiles=["KVT-SECURE"])
def bind_default(ctx: Context) -> None:
    """Unless told otherwise, nothing listens on an address that other hosts can reach.

    A backend whose library offers no choice declares it: ``listens`` among its
    probe's details, where an operator sees it before anything is opened.
    """
    ctx.b.metadata()
    found = ctx.peer.call("listeners")
    ctx.detail["listeners"] = [f"{family} {address}:{port}" for family, address, port in found]
    options = ctx.a.station.loaded.options
    if any("listen" in key or "advertise" in key or "address" in key for key in options):
        raise NotVerified(f"the configuration sets an address: {sorted(options)}")
    open_wide = [
        f"{address}:{port}"
        for family, address, port in found
        if family != "unix" and not is_loopback(address)
    ]
    loaded = ctx.a.station.loaded
    declared = loaded.backend.probe(loaded.config()).details.get("listens")
    if open_wide and declared:
        raise NotSupported(f"declared: it listens on {declared}")
    ctx.expect(not open_wide, f"listens where other hosts can reach it: {open_wide}")


@check("SEC-08", level="core", profiles=["KVT-BASE", "KVT-SECURE"], needs=["op"], fresh=True,
       noisy=True)  # fmt: skip
def no_secrets_in_logs(ctx: Context) -> None:
    """At every log level, nothing of a metadata body (keys are in it) is logged by either side."""
    ctx.process.log_everything()
    ctx.peer.call("log_everything")
    scene = ctx.scene(SIZE)
    for op in ctx.ops:
        scene.move(op, Ranges.whole(SIZE))
    bodies = (ctx.a.raw_export(), ctx.b.raw_export())
    ctx.b.close()
    try:
        scene.move(ctx.op, Ranges.whole(SIZE), deadline_s=2.0)
    except Exception as error:  # noqa: BLE001  # any failure is fine; only its log counts
        ctx.detail["failure"] = type(error).__name__
    for who, text in (("worker", ctx.process.all_logs()), ("peer", ctx.peer.call("all_logs"))):
        for body in bodies:
            leak = _leaks(text, body)
            ctx.expect(not leak, f"the {who}'s log holds bytes of a metadata body: {leak}")


def _leaks(text: str, body: bytes) -> str:
    """Return a 16-byte window of ``body`` that ``text`` shows raw, as hex or as base64."""
    for at in range(0, max(1, len(body) - 16), 4):
        window = body[at : at + 16]
        if len(set(window)) < 8:
            continue  # zeros and lengths, no key
        forms = (window.hex(), base64.b64encode(window)[:20].decode(), repr(window)[2:-1])
        if any(form in text for form in forms):
            return f"{window[:4].hex()}..."
    return ""
