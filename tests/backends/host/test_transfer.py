"""Bytes arrive where they belong, on both paths, between two processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from support.host_pair import Pair, Remote, pattern

from kvtransport.layout.blocks import BlockTable
from kvtransport.layout.blocks import Pair as Descriptors
from kvtransport.transfer import TransferState

CANARY = 0xA5
SIZES = sorted(
    {
        1, 2, 3, 63, 64, 65, 333, 1 << 20, 3 << 20, (8 << 20) + 1, (17 << 20) + 12345,
        *(base + step for base in (4096, 8192, 65536, 1 << 20) for step in (-1, 0, 1)),
    }
)  # fmt: skip


@pytest.mark.parametrize("odd", [0, 1, 4095])
def test_read_of_every_size_at_any_offset(
    make_pair: Callable[..., Pair], path: str, odd: int
) -> None:
    pair = make_pair({"path": path})
    total = max(SIZES) + 8192
    pair.remote.call("register", name="kv", nbytes=total, seed=1)
    here = pair.memory("mine", total)
    pair.connect()
    there = pattern(1, total)
    for size in SIZES:
        here[:] = CANARY
        ranges = Descriptors.ranges(
            pair.local["mine"], [odd], pair.peer.region("kv"), [4096 - odd], [size]
        )
        transfer = pair.agent.read(pair.peer, [ranges])
        transfer.wait(20)
        assert transfer.nbytes == size
        assert (here[odd : odd + size] == there[4096 - odd : 4096 - odd + size]).all()
        assert (here[:odd] == CANARY).all()
        assert (here[odd + size :] == CANARY).all()
    assert pair.counters()[f"{path}_read_bytes"] == sum(SIZES)
    assert pair.remote.call("digest", name="kv") == hashlib.sha256(there.tobytes()).hexdigest()


def test_write_of_every_size(make_pair: Callable[..., Pair], path: str) -> None:
    pair = make_pair({"path": path})
    total = max(SIZES) + 8192
    pair.remote.call("register", name="kv", nbytes=total)
    here = pair.memory("mine", total)
    here[:] = source = pattern(3, total)
    pair.connect()
    for size in SIZES:
        pair.remote.call("set", name="kv", value=CANARY)
        ranges = Descriptors.ranges(pair.local["mine"], [7], pair.peer.region("kv"), [4095], [size])
        pair.agent.write(pair.peer, [ranges]).wait(20)
        expected = np.full(total, CANARY, np.uint8)
        expected[4095 : 4095 + size] = source[7 : 7 + size]
        assert (
            pair.remote.call("digest", name="kv") == hashlib.sha256(expected.tobytes()).hexdigest()
        )
    assert (here == source).all()
    assert pair.counters()[f"{path}_write_bytes"] == sum(SIZES)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025, 9000])
def test_permuted_blocks_and_gaps(make_pair: Callable[..., Pair], path: str, count: int) -> None:
    """Block i of each side at a random place; the gap after each block stays as it was."""
    pair = make_pair({"path": path})
    block, stride = 1000, 1024
    pair.remote.call("register", name="kv", nbytes=count * stride, seed=2)
    here = pair.memory("mine", count * stride, fill=CANARY)
    pair.connect()
    rng = np.random.default_rng(count)
    mine, theirs = rng.permutation(count), rng.permutation(count)
    tables = (
        BlockTable(region, base=0, stride=stride, block_nbytes=block, count=count)
        for region in (pair.local["mine"], pair.peer.region("kv"))
    )
    transfer = pair.agent.read(pair.peer, [Descriptors.blocks(*tables, mine, theirs)])
    transfer.wait(20)
    rows, there = here.reshape(count, stride), pattern(2, count * stride).reshape(count, stride)
    assert (rows[mine, :block] == there[theirs, :block]).all()
    assert (rows[:, block:] == CANARY).all()


def test_many_regions_in_one_transfer(make_pair: Callable[..., Pair], path: str) -> None:
    pair = make_pair({"path": path})
    layers, nbytes = 80, 5000
    for layer in range(layers):
        pair.remote.call("register", name=f"kv.{layer}", nbytes=nbytes, seed=layer)
    here = [pair.memory(f"kv.{layer}", nbytes) for layer in range(layers)]
    pair.connect()
    pairs = [
        Descriptors.ranges(
            pair.local[f"kv.{layer}"], [layer], pair.peer.region(f"kv.{layer}"), [0], [4000]
        )
        for layer in range(layers)
    ]
    pair.agent.read(pair.peer, pairs).wait(20)
    for layer in range(layers):
        assert (here[layer][layer : layer + 4000] == pattern(layer, nbytes)[:4000]).all()


def test_notification_comes_after_the_data_and_once(
    make_pair: Callable[..., Pair], path: str
) -> None:
    pair = make_pair({"path": path})
    pair.remote.call("register", name="kv", nbytes=1 << 20)
    pair.memory("mine", 1 << 20, fill=9)
    pair.connect()
    ranges = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("kv"), [0], [1 << 20])
    payloads = [b"", b"\0\xff", b"x" * 65536]
    for payload in payloads:
        pair.remote.call("set", name="kv", value=0)
        pair.agent.write(pair.peer, [ranges], notify=payload).wait(20)
        assert pair.remote.call("notifications") == [["here", payload.hex()]]
        assert (
            pair.remote.call("digest", name="kv")
            == hashlib.sha256(bytes([9]) * (1 << 20)).hexdigest()
        )
    pair.agent.read(pair.peer, [ranges], notify=b"after read").wait(20)
    pair.agent.notify(pair.peer, b"alone").wait(20)
    received = pair.remote.call("notifications")
    assert received == [["here", b"after read".hex()], ["here", b"alone".hex()]]
    assert pair.remote.call("notifications") == []


def test_notification_needs_to_be_attributable(
    make_remote: Callable[..., Remote], make_pair: Callable[..., Pair], path: str
) -> None:
    pair = make_pair({"path": path})
    peer = pair.agent.add_peer(bytes.fromhex(pair.remote.call("export")))
    transfer = pair.agent.notify(peer, b"who am I")
    with pytest.raises(Exception, match="has not imported this agent"):
        transfer.wait(20)
    assert transfer.state is TransferState.FAILED
    assert pair.remote.call("notifications") == []


def test_full_inbox_is_an_error_and_loses_nothing(
    make_pair: Callable[..., Pair], path: str
) -> None:
    pair = make_pair({"path": path}, {"path": path, "max_notifications": 3})
    pair.connect()
    for index in range(3):
        pair.agent.notify(pair.peer, bytes([index])).wait(20)
    with pytest.raises(Exception, match="too many unread"):
        pair.agent.notify(pair.peer, b"one more").wait(20)
    assert [body for _, body in pair.remote.call("notifications")] == ["00", "01", "02"]
    pair.agent.notify(pair.peer, b"again").wait(20)


def test_both_directions_at_once(make_pair: Callable[..., Pair], path: str) -> None:
    pair = make_pair({"path": path})
    n = 4 << 20
    pair.remote.call("register", name="kv", nbytes=n, seed=1)
    here = pair.memory("in", n)
    pair.memory("out", n, fill=8)
    pair.remote.call("register", name="sink", nbytes=n)
    pair.connect()
    reads, writes = [], []
    for _ in range(20):
        ranges = Descriptors.ranges(pair.local["in"], [0], pair.peer.region("kv"), [0], [n])
        reads.append(pair.agent.read(pair.peer, [ranges]))
        ranges = Descriptors.ranges(pair.local["out"], [0], pair.peer.region("sink"), [0], [n])
        writes.append(pair.agent.write(pair.peer, [ranges]))
    for transfer in reads + writes:
        transfer.wait(30)
    assert (here == pattern(1, n)).all()
    assert pair.remote.call("digest", name="sink") == hashlib.sha256(bytes([8]) * n).hexdigest()


def test_256_transfers_in_flight(make_pair: Callable[..., Pair], path: str) -> None:
    pair = make_pair({"path": path, "inline_bytes": 0})
    n = 256 * 4096
    pair.remote.call("register", name="kv", nbytes=n, seed=1)
    here = pair.memory("mine", n)
    pair.connect()
    transfers = [
        pair.agent.read(
            pair.peer,
            [
                Descriptors.ranges(
                    pair.local["mine"], [at], pair.peer.region("kv"), [n - 4096 - at], [4096]
                )
            ],
        )
        for at in range(0, n, 4096)
    ]
    for transfer in transfers:
        transfer.wait(30)
    assert (here.reshape(-1, 4096) == pattern(1, n).reshape(-1, 4096)[::-1]).all()
