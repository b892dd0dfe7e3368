"""MD: metadata and the first contact between two agents."""

from __future__ import annotations

import pickle
import struct
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

from kvtransport import metadata
from kvtransport.backend import API_VERSION
from kvtransport.errors import (
    IncompatiblePeerError,
    KVTransportError,
    MalformedMetadataError,
    PeerError,
    PeerLostError,
    StaleDescriptorError,
    UnsupportedError,
)
from kvtransport_conformance.context import Context, Ranges, Scene
from kvtransport_conformance.detour import Detour
from kvtransport_conformance.patterns import Pattern
from kvtransport_conformance.registry import check
from kvtransport_conformance.sides import LocalSide

SIZE = 1 << 16
GOLD = Path(__file__).parent.parent / "gold"
HANDSHAKE_BOUND_S = 15.0


@check("MD-01", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True)
def two_process_roundtrip(ctx: Context) -> None:
    """Metadata carried to another process gives names, sizes and access, and it works there."""
    scene = ctx.scene(SIZE)
    peer = ctx.a.station.peers["peer"]
    found = {name: (region.nbytes, sorted(region.access)) for name, region in peer.regions.items()}
    want = dict.fromkeys(("src", "dst"), (SIZE, ["read", "write"]))
    ctx.expect(found == want, f"the peer's regions arrived as {found}")
    for op in ctx.ops:
        for reverse in (False, True):
            scene.move(op, Ranges.whole(SIZE), reverse=reverse)
            scene.arrived(op, Ranges.whole(SIZE), reverse=reverse)
            scene.blank(op, reverse=reverse)


@check("MD-02", level="core", profiles=["KVT-BASE", "KVT-FAULT"], first_release=True, noisy=True,
       timeout_s=90)  # fmt: skip
def garbage_bytes(ctx: Context) -> None:
    """500 damaged blobs are refused with ``MalformedMetadataError``; none crashes or hangs."""
    scene = ctx.scene(SIZE)
    real = ctx.b.metadata()
    for number in range(500):
        blob = _damaged(ctx, real, number)
        ctx.raises(
            (MalformedMetadataError, IncompatiblePeerError),
            partial(ctx.a.add_peer, blob, "bad"),
            f"damaged metadata number {number} of {len(blob)} bytes",
        )
    body = ctx.b.raw_export()
    deadline = time.monotonic() + 20.0
    tried = 0
    while tried < 200 and time.monotonic() < deadline:
        error = ctx.a.raw_import(_damaged(ctx, body, tried))
        ctx.expect(error is None or error["ours"], f"the backend raised {error}")
        tried += 1
    ctx.detail["bodies"] = tried
    foreign = ctx.a.tap_report()["foreign_errors"]
    ctx.expect(not foreign, f"a damaged body made the backend raise {foreign[:3]}")
    if ctx.ops:
        scene.move(ctx.op, Ranges.whole(SIZE))
        scene.arrived(ctx.op, Ranges.whole(SIZE), "after the garbage")


def _damaged(ctx: Context, real: bytes, number: int) -> bytes:
    """Random, truncated, extended or flipped bytes; never equal to ``real``."""
    rng = ctx.rng
    kind = number % 4
    if kind == 0:
        return rng.bytes(int(rng.integers(0, 400)))
    if kind == 1:
        return real[: int(rng.integers(0, len(real)))]
    if kind == 2:
        return real + rng.bytes(int(rng.integers(1, 64)))
    flipped = bytearray(real)
    for _ in range(int(rng.integers(1, 5))):
        flipped[int(rng.integers(0, len(flipped)))] ^= int(rng.integers(1, 256))
    return bytes(flipped) if bytes(flipped) != real else real[:-1]


@check(
    "MD-03", level="core", profiles=["KVT-BASE"], first_release=True,
    why="NIXL's connector version went from 1 to 14",
)  # fmt: skip
def version_mismatch(ctx: Context) -> None:
    """Other versions are refused naming both, before anything else is decoded."""
    ctx.a.open()
    real = ctx.b.metadata()
    for offset, version in ((4, metadata.SCHEMA_VERSION), (6, API_VERSION)):
        blob = _with_version(real, offset, version + 41)
        error = ctx.raises(IncompatiblePeerError, partial(ctx.a.add_peer, blob), "version")
        for word in (str(version + 41), str(version)):
            ctx.expect(word in str(error), f"the refusal does not name {word}: {error}")
    station = ctx.local("foreign").station
    station.open(wire="kvt-somebody-else/9")
    error = ctx.raises(IncompatiblePeerError, lambda: station.add_peer(real), "another wire")
    ctx.expect("kvt-somebody-else/9" in str(error), f"the refusal does not name the wire: {error}")


def _with_version(real: bytes, offset: int, version: int) -> bytes:
    """Change a version, repair the header's own checksum, and ruin the payload."""
    prefix = bytearray(real[:16])
    struct.pack_into(">H", prefix, offset, version)
    return bytes(prefix) + struct.pack(">I", zlib.crc32(bytes(prefix))) + b"\xff" * 40


@check("MD-04", level="core", profiles=["KVT-BASE"])
def fingerprint_mismatch(ctx: Context) -> None:
    """Different fingerprints are refused, naming both, before the backend sees the peer."""
    ctx.a.open(fingerprint=b"\x11" * 16)
    ctx.b.open(fingerprint=b"\x22" * 16)
    blob = ctx.b.metadata()
    error = ctx.raises(IncompatiblePeerError, lambda: ctx.a.add_peer(blob), "fingerprint")
    for word in ("11" * 16, "22" * 16):
        ctx.expect(word in str(error), f"the refusal does not name {word}: {error}")
    ctx.expect(not ctx.a.station.agent.peers, "the refused peer was imported")


@check(
    "MD-05", level="core", profiles=["KVT-BASE", "KVT-SECURE"], needs=["op"], first_release=True,
    noisy=True, why="nixl#2051, vllm#52234: a stale handle returned the previous prompt's answer",
)  # fmt: skip
def stale_generation_refused(ctx: Context) -> None:
    """Handles of a former registration, or of a restarted peer, raise instead of moving."""
    scene = ctx.scene(SIZE)
    name = "dst" if ctx.op == "write" else "src"
    ctx.a.keep_region(name)
    stale = scene.piece(ctx.op, Ranges.whole(SIZE), remote=f"~{name}")
    ctx.b.deregister(name)
    generation = ctx.b.register(name)[1]
    ctx.expect(generation > 1, f"a second registration has generation {generation}")
    ctx.a.add_peer(ctx.b.metadata())
    ctx.raises(StaleDescriptorError, lambda: ctx.a.move(ctx.op, [stale]), "a former registration")
    scene.move(ctx.op, Ranges.whole(SIZE))
    ctx.b.close()
    ctx.b.register("src")
    ctx.b.register("dst")
    ctx.a.keep_region(name)
    ctx.a.add_peer(ctx.b.metadata(), "new")
    fresh = scene.piece(ctx.op, Ranges.whole(SIZE), remote=f"~{name}")
    ctx.raises(
        (StaleDescriptorError, PeerLostError),
        lambda: ctx.a.move(ctx.op, [fresh], "new"),
        "a region of the peer's former incarnation",
    )
    ctx.a.move(ctx.op, [scene.piece(ctx.op, Ranges.whole(SIZE))], "new")


@check("MD-06", level="extended", profiles=["KVT-BASE"], needs=["op", "dynamic_regions"])
def region_added_later(ctx: Context) -> None:
    """A region registered after the first contact is reachable after the next export."""
    scene = ctx.scene(SIZE)
    old = ctx.a.station.peers["peer"]
    ctx.b.register("late", "dst" if ctx.op == "write" else "src")
    ctx.a.add_peer(ctx.b.metadata())
    ctx.expect(ctx.a.station.peers["peer"] is old, "a newer export gave a new peer")
    piece = scene.piece(ctx.op, Ranges.whole(SIZE), remote="late")
    ctx.a.move(ctx.op, [piece])
    scene.arrived(ctx.op, Ranges.whole(SIZE), "through a region added later")
    scene.move(ctx.op, Ranges.whole(SIZE))


@check("MD-07", level="core", profiles=["KVT-BASE"], needs=["op"], first_release=True, noisy=True)
def add_peer_idempotent(ctx: Context) -> None:
    """The same bytes give the same peer; a new incarnation gives a new one."""
    scene = ctx.scene(SIZE)
    blob = ctx.b.metadata()
    first, again = ctx.a.add_peer(blob, "x"), ctx.a.add_peer(blob, "y")
    ctx.expect(first[0] == again[0], f"the same metadata gave peers {first[0]} and {again[0]}")
    ctx.b.close()
    ctx.b.register("src")
    ctx.b.register("dst")
    other = ctx.a.add_peer(ctx.b.metadata(), "peer")
    ctx.expect(other[0] != first[0], "a restarted peer got the old peer's identity")
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), "with the peer's new incarnation")


@check("MD-08", level="core", profiles=["KVT-BASE"], needs=["op"], noisy=True)
def removed_peer_refused(ctx: Context) -> None:
    """A removed peer takes no transfers, and can be added again."""
    scene = ctx.scene(SIZE)
    blob = ctx.b.metadata()
    pairs = ctx.a.station.pairs([scene.piece(ctx.op, Ranges.whole(SIZE))], "peer")
    peer = ctx.a.station.peers["peer"]
    ctx.a.remove_peer("peer")
    agent = ctx.a.station.agent
    call = agent.write if ctx.op == "write" else agent.read
    ctx.raises((StaleDescriptorError, PeerLostError), lambda: call(peer, pairs), "a removed peer")
    ctx.a.add_peer(blob)
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), "after the peer was added again")


@check(
    "MD-09", level="core", profiles=["KVT-FAULT"], needs=["op"], first_release=True,
    noisy=True, timeout_s=90, why="MoRIIO's dial has no receive timeout",
)  # fmt: skip
def silent_peer_bounded(ctx: Context) -> None:
    """Contact with a peer that is there but answers nothing ends by its deadline."""
    mute = ctx.spawn("mute")
    side = mute.side()
    ctx.a.open(options={"drain_s": 3.0})
    scene = ctx.scene(SIZE)
    side.alloc("src", SIZE, ["const", 1])
    side.alloc("dst", SIZE, ["const", 1])
    side.register("src")
    side.register("dst")
    blob = side.metadata()
    mute.freeze()
    try:
        started = time.monotonic()
        outcome = _contact(ctx, scene.piece(ctx.op, Ranges.whole(SIZE)), blob)
        took = time.monotonic() - started
        ctx.detail.update(outcome=outcome, seconds=round(took, 2))
        ctx.expect(outcome not in {"in_flight", "draining"}, f"contact with a mute peer: {outcome}")
        ctx.expect(took < 2 * HANDSHAKE_BOUND_S, f"contact with a mute peer took {took:.1f} s")
    finally:
        mute.thaw()
    scene.move(ctx.op, Ranges.whole(SIZE))
    scene.arrived(ctx.op, Ranges.whole(SIZE), "traffic to another peer afterwards")
    _muted_on_the_way(ctx, scene)


def _contact(ctx: Context, piece: list[object], blob: bytes) -> str:
    """Import a mute peer and use it once; every way to end is fine but waiting for ever."""
    return contact(ctx, ctx.a, piece, blob, "mute")


def contact(
    ctx: Context, side: LocalSide, piece: list[object], blob: bytes, key: str = "peer"
) -> str:
    """Import a peer and post one transfer with a deadline of 3 s; say how that ended."""
    try:
        side.add_peer(blob, key)
    except KVTransportError as error:
        return f"refused: {type(error).__name__}"
    return use_once(ctx, side, piece, key)


def use_once(ctx: Context, side: LocalSide, piece: list[object], key: str = "peer") -> str:
    """Post one transfer with a deadline of 3 s; say how it ended."""
    try:
        number = side.post(ctx.op, [piece], key, 3.0)
    except KVTransportError as error:
        return f"refused: {type(error).__name__}"
    return str(side.settle(number, HANDSHAKE_BOUND_S)["state"])


def proxied(ctx: Context, name: str) -> LocalSide:
    """A further agent of the worker with memory of its own, to be connected by a proxy."""
    side = ctx.local(name)
    side.open(options={"drain_s": 3.0})
    side.alloc("src", SIZE, ["coded", 1])
    side.alloc("dst", SIZE, ["const", 0xEE])
    side.register("src")
    side.register("dst")
    return side


WAITING = frozenset({"in_flight", "draining", "pending"})
NO_PROXY = "the peer is not reached through a TCP port that its metadata names"


def _muted_on_the_way(ctx: Context, scene: Scene) -> None:
    """The same through a proxy that swallows everything: before the handshake, and after."""
    piece = scene.piece(ctx.op, Ranges.whole(SIZE))
    with ctx.detour() as found:
        if found is None:
            ctx.detail["proxy"] = NO_PROXY
            return
        detour, blob = found
        connected = proxied(ctx, "connected")
        connected.add_peer(blob)
        detour.mode = "mute"
        started = time.monotonic()
        states = [
            contact(ctx, proxied(ctx, "dialling"), piece, blob),
            use_once(ctx, connected, piece),
        ]
        took = time.monotonic() - started
        ctx.detail["proxy"] = f"muted: {', '.join(states)}, after {took:.1f} s"
        wrong = {"done", *WAITING} & set(states)
        ctx.expect(not wrong, f"through a mute proxy a transfer is {wrong}")
        ctx.local("connected").station.reset()
        ctx.local("dialling").station.reset()


@check("MD-10", level="core", profiles=["KVT-BASE", "KVT-SECURE"], noisy=True)
def safe_decoding(ctx: Context) -> None:
    """Metadata is never unpickled or evaluated, and oversized metadata is refused unread."""
    ctx.a.open()
    with tempfile.TemporaryDirectory() as folder:
        bait = Path(folder) / "executed"
        bomb = pickle.dumps(_Bomb(str(bait)))
        code = f"__import__('pathlib').Path({str(bait)!r}).touch()".encode()
        for payload in (bomb, code):
            ctx.raises(PeerError, partial(ctx.a.add_peer, payload), "executable metadata")
            error = ctx.a.raw_import(payload)
            ctx.expect(error is not None, "the backend accepted executable bytes as a peer")
            ctx.expect(not bait.exists(), "decoding metadata executed what it contains")
    huge = bytes(metadata.MAX_METADATA_BYTES + 1)
    started = time.monotonic()
    ctx.raises(MalformedMetadataError, lambda: ctx.a.add_peer(huge), "oversized metadata")
    ctx.expect(time.monotonic() - started < 1.0, "refusing oversized metadata took over a second")


class _Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (Path(self.path),))


@check(
    "MD-11", level="core", profiles=["KVT-FAULT"], needs=["op"], first_release=True,
    noisy=True, timeout_s=90,
    why="vllm#55870: a failed handshake left its waiting requests waiting for ever",
)  # fmt: skip
def failed_handshake_fails_waiters(ctx: Context) -> None:
    """When a peer dies, every transfer that waits for it ends with a typed error."""
    mortal = ctx.spawn("mortal")
    scene = ctx.scene(1 << 22, other=mortal.side())
    ctx.scene(SIZE, one=ctx.local("witness"))
    numbers: list[int] = []
    refused = 0
    mortal.kill()
    for _ in range(8):
        try:
            numbers.append(scene.post(ctx.op, Ranges.whole(1 << 22), deadline_s=5.0))
        except KVTransportError:
            refused += 1
    open_ends = []
    for number in numbers:
        result = ctx.a.settle(number, 30.0)
        if result["state"] not in {"failed", "quarantined", "cancelled"}:
            open_ends.append(result["state"])
        elif result["error"] is None:
            open_ends.append("ended without an error")
    ctx.detail.update(refused=refused, failed=len(numbers) - len(open_ends))
    ctx.expect(not open_ends, f"{len(open_ends)} of {len(numbers)} waiting transfers: {open_ends}")
    with ctx.detour() as found:
        if found is None:
            ctx.detail["proxy"] = NO_PROXY
            return
        for mode in ("truncate", "garbage", "slow"):
            _damaged_on_the_way(ctx, *found, mode)


def _damaged_on_the_way(ctx: Context, detour: Detour, blob: bytes, mode: str) -> None:
    """A proxy that damages a handshake costs typed errors, never a wait or a wrong success."""
    side = proxied(ctx, f"behind-{mode}")
    detour.mode = mode
    piece = Scene.piece(ctx.op, Ranges.of([0], [0], [4096]))
    state = contact(ctx, side, piece, blob)
    ctx.detail[mode] = state
    ctx.expect(state not in WAITING, f"behind a proxy that does {mode}, a transfer is {state}")
    if state == "done":
        sink, key = (ctx.b, 1) if ctx.op == "write" else (side, 2)
        found = sink.peek("dst", 0, 4096)
        want = Pattern("coded", key).data(0, 4096).tobytes()
        ctx.expect(found == want, f"a transfer was done in spite of {mode}, with wrong bytes")
    side.station.reset()


@check("MD-12", level="core", profiles=["KVT-BASE"])
def gold_metadata(ctx: Context) -> None:
    """Metadata saved from every release is decoded, or refused by its version."""
    blobs = sorted(GOLD.glob("*.bin"))
    ctx.expect(blobs, "the suite's gold files are missing")
    station = ctx.a.station
    for path in blobs:
        blob = path.read_bytes()
        try:
            header, raw = metadata.open_metadata(blob)
            body = metadata.decode_body(raw)
        except IncompatiblePeerError as error:
            ctx.detail[path.name] = f"refused: {error}"
            continue
        ctx.expect(header.name and body.regions, f"{path.name} decoded to nothing")
        try:
            station.add_peer(blob, path.name)
        except MalformedMetadataError as error:
            ctx.expect(header.wire != station.tap.info.wire, f"{path.name}: {error}")
        except (PeerError, UnsupportedError) as error:
            ctx.detail[path.name] = type(error).__name__
        else:
            ctx.detail[path.name] = "imported"


@check(
    "MD-13", level="core", profiles=["KVT-FAULT", "KVT-SECURE"], needs=["op"], noisy=True,
    timeout_s=60, why="vllm#54757: one malformed request ended the listener for good",
)  # fmt: skip
def listener_survives_bad_client(ctx: Context) -> None:
    """Garbage, huge lengths and rude hang-ups at every listener leave the agent working."""
    scene = ctx.scene(SIZE)
    known = ctx.peer.call("listeners")
    ctx.detail["listeners"] = [f"{family} {address}:{port}" for family, address, port in known]
    for family, address, port in known:
        taken = ctx.peer.call(
            "attack", family=family, address=address, port=port, seed=ctx.seed % (1 << 31)
        )
        ctx.detail["connections"] = ctx.detail.get("connections", 0) + taken
    for op in ctx.ops:
        for reverse in (False, True):
            scene.move(op, Ranges.whole(SIZE), reverse=reverse)
            scene.arrived(op, Ranges.whole(SIZE), "after rude clients", reverse=reverse)
            scene.blank(op, reverse=reverse)
    newcomer = ctx.local("newcomer")
    newcomer.alloc("src", SIZE, ["coded", 1])
    newcomer.alloc("dst", SIZE, ["const", 0xEE])
    newcomer.register("src")
    newcomer.register("dst")
    ctx.connect(newcomer, ctx.b, "peer", "newcomer")
    newcomer.move(ctx.op, [scene.piece(ctx.op, Ranges.whole(SIZE))])
