"""What is refused before anything is posted, and how the error reads."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransport.errors import (
    DescriptorError,
    LengthMismatchError,
    OutOfBoundsError,
    RegionBusyError,
    StaleDescriptorError,
    UnsupportedError,
)
from kvtransport.layout.blocks import BlockTable, Pair

SIZE = 1 << 16
MANY = np.arange(10) * 100


def refuse(duo, pairs, error, match=None):
    with pytest.raises(error, match=match):
        duo.a.agent.read(duo.peer, pairs)
    assert duo.a.backend.posts == []
    assert not duo.a.region.busy


@pytest.mark.parametrize("count", [1, 10], ids=["short", "vector"])
@pytest.mark.parametrize(
    ("local", "remote", "nbytes"),
    [
        (SIZE, 0, 1),
        (0, SIZE, 1),
        (SIZE - 1, 0, 2),
        (0, SIZE - 1, 2),
        (0, 0, SIZE + 1),
        ((1 << 63) - 1, 0, (1 << 63) - 1),
        (0, (1 << 63) - 8, 16),
        (1 << 64, 0, 1),
        ((1 << 64) - 8, 0, 16),
        (0, 0, (1 << 64) - 1),
        (-1, 0, 1),
        (0, -(1 << 63), 1),
        (0, 0, -1),
    ],
)
def test_out_of_bounds(duo, count, local, remote, nbytes):
    offsets = list(range(0, 100 * (count - 1), 100))
    pair = Pair.ranges(
        duo.a.region,
        [*offsets, local],
        duo.remote,
        [*offsets, remote],
        [*[1] * (count - 1), nbytes],
    )
    refuse(duo, [pair], OutOfBoundsError)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.int32, np.uint8])
def test_every_integer_type_is_fine(duo, dtype):
    index = np.arange(0, 100, 10, dtype=dtype)
    pair = Pair.ranges(duo.a.region, index, duo.remote, index, np.full(10, 3, dtype))
    duo.a.agent.read(duo.peer, [pair]).wait(1)


def test_uint64_beyond_int64_is_refused(duo):
    index = np.full(6, 1 << 63, np.uint64)
    refuse(duo, [Pair.ranges(duo.a.region, index, duo.remote, index, 1)], OutOfBoundsError)


@pytest.mark.parametrize(
    "bad", [[0.5], ["0"], [None], [True, False], [[0, 1]], np.zeros((2, 2), int), {1: 2}, object()]
)
def test_not_a_vector_of_integers(duo, bad):
    refuse(duo, [Pair.ranges(duo.a.region, bad, duo.remote, [0], 1)], DescriptorError)


@pytest.mark.parametrize("n", [2, 10])
def test_length_mismatch(duo, n):
    many = list(range(0, 100 * n, 100))
    for pair in (
        Pair.ranges(duo.a.region, many, duo.remote, many[1:], 10),
        Pair.ranges(duo.a.region, many, duo.remote, many, [10] * (n - 1)),
        Pair.blocks(
            BlockTable(duo.a.region, 0, 8, 8, 2000), BlockTable(duo.remote, 0, 8, 8, 2000),
            many, many[1:],
        ),
    ):  # fmt: skip
        refuse(duo, [pair], LengthMismatchError, f"{n}")


def test_blocks_of_different_size(duo):
    mine, theirs = BlockTable(duo.a.region, 0, 64, 64, 8), BlockTable(duo.remote, 0, 64, 32, 8)
    refuse(duo, [Pair.blocks(mine, theirs, [0], [0])], LengthMismatchError, "64 bytes.*32")


@pytest.mark.parametrize("n", [1, 10])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_block_outside_its_table(duo, n, side):
    mine, theirs = BlockTable(duo.a.region, 0, 8, 8, 20), BlockTable(duo.remote, 0, 8, 8, 20)
    good, bad = list(range(n)), [*range(1, n), 20]
    local, remote = (bad, good) if side == "local" else (good, bad)
    refuse(
        duo, [Pair.blocks(mine, theirs, local, remote)], OutOfBoundsError, f"{side} block 20.*20"
    )


@pytest.mark.parametrize(
    ("base", "stride", "block_nbytes", "count", "error"),
    [
        (0, 8, 16, 2, DescriptorError),
        (0, 0, 0, 1, DescriptorError),
        (-1, 8, 8, 1, DescriptorError),
        (0, 8, 8, 0, DescriptorError),
        (0, 8.0, 8, 1, DescriptorError),
        (0, 8, 8, SIZE // 8 + 1, OutOfBoundsError),
        (1, SIZE, SIZE, 1, OutOfBoundsError),
        (1 << 63, 8, 8, 1 << 62, OutOfBoundsError),
    ],
)
def test_impossible_tables(duo, base, stride, block_nbytes, count, error):
    with pytest.raises(error):
        BlockTable(duo.a.region, base, stride, block_nbytes, count)


class TestOverlappingDestinations:
    @pytest.mark.parametrize("offsets", [[0, 5], [0, 5, *range(100, 800, 100)]])
    def test_ranges(self, duo, offsets):
        far = [i * 1000 for i in range(len(offsets))]
        pair = Pair.ranges(duo.a.region, offsets, duo.remote, far, 6)
        refuse(duo, [pair], DescriptorError, "kv")
        # The other way round the source may be named twice.
        pair = Pair.ranges(duo.a.region, far, duo.remote, offsets, 6)
        duo.a.agent.read(duo.peer, [pair]).wait(1)

    @pytest.mark.parametrize("n", [3, 30, 3000])
    def test_block_named_twice(self, duo, n):
        mine, theirs = (BlockTable(r, 0, 4, 4, 4096) for r in (duo.a.region, duo.remote))
        index = np.arange(n)
        twice = index.copy()
        twice[-1] = twice[0]
        refuse(duo, [Pair.blocks(mine, theirs, twice, index)], DescriptorError)
        duo.a.agent.read(duo.peer, [Pair.blocks(mine, theirs, index, twice)]).wait(1)

    def test_huge_indices_need_no_huge_memory(self, duo):
        mine, theirs = (BlockTable(r, 0, 1, 1, SIZE) for r in (duo.a.region, duo.remote))
        index = np.arange(10)[::-1] + (1 << 60)
        refuse(duo, [Pair.blocks(mine, theirs, index, np.arange(10))], OutOfBoundsError)

    def test_sparse_duplicates(self, duo):
        mine, theirs = (BlockTable(r, 0, 1, 1, SIZE) for r in (duo.a.region, duo.remote))
        index = np.array([60000, 5, 7, 60000, 9, 11])
        refuse(duo, [Pair.blocks(mine, theirs, index, np.arange(6))], DescriptorError)

    def test_two_tables_on_the_same_bytes(self, duo):
        mine, theirs = (BlockTable(r, 0, 16, 16, 64) for r in (duo.a.region, duo.remote))
        other = BlockTable(duo.a.region, 8, 16, 16, 64)
        for n in (2, 20):
            index = np.arange(n)
            pairs = [Pair.blocks(m, theirs, index, index) for m in (mine, other)]
            refuse(duo, pairs, DescriptorError)

    @pytest.mark.parametrize("n", [2, 20])
    def test_interleaved_tables_are_fine(self, duo, n):
        index = np.arange(n)
        pairs = [
            Pair.blocks(
                BlockTable(duo.a.region, 100 + part * 16, 64, 16, 64),
                BlockTable(duo.remote, part * 16, 64, 16, 64),
                index,
                index,
            )
            for part in range(4)
        ]
        duo.a.agent.read(duo.peer, pairs).wait(1)
        assert np.array_equal(duo.a.memory[100 : 100 + 64 * n], duo.b.memory[: 64 * n])

    def test_meshing_tables_are_checked_exactly(self, duo):
        # Different strides: only a look at every descriptor can tell.
        theirs = BlockTable(duo.remote, 0, 8, 8, 64)
        even = BlockTable(duo.a.region, 0, 16, 8, 64)
        sparse = BlockTable(duo.a.region, 8, 32, 8, 64)
        clash = BlockTable(duo.a.region, 32, 48, 8, 64)
        index = np.arange(20)
        good = [Pair.blocks(t, theirs, index, index) for t in (even, sparse)]
        duo.a.agent.read(duo.peer, good).wait(1)
        duo.a.backend.posts.clear()
        refuse(duo, [Pair.blocks(t, theirs, index, index) for t in (even, clash)], DescriptorError)

    def test_blocks_against_ranges(self, duo):
        mine, theirs = (BlockTable(r, 0, 16, 16, 64) for r in (duo.a.region, duo.remote))
        pairs = [
            Pair.blocks(mine, theirs, np.arange(10), np.arange(10)),
            Pair.ranges(duo.a.region, [159], duo.remote, [0], [1]),
        ]
        refuse(duo, pairs, DescriptorError)


def test_read_only_buffer_cannot_be_a_destination(duo):
    source = duo.a.agent.register(bytes(100), name="ro", access="r")
    with pytest.raises(DescriptorError, match="read-only"):
        duo.a.agent.read(duo.peer, [Pair.ranges(source, [0], duo.remote, [0], 10)])
    duo.a.agent.write(duo.peer, [Pair.ranges(source, [0], duo.remote, [0], 10)]).wait(1)


@pytest.mark.parametrize(("access", "op"), [("r", "write"), ("w", "read"), ("", "read")])
def test_remote_access(duo, access, op):
    duo.b.agent.register(bytearray(100), name="x", access=access)
    peer = duo.a.agent.add_peer(duo.b.agent.metadata())
    with pytest.raises(DescriptorError, match=f"'b' does not allow {op} access.*'x'"):
        getattr(duo.a.agent, op)(peer, [Pair.ranges(duo.a.region, [0], peer.region("x"), [0], 1)])


def test_absent_operation(make_duo):
    duo = make_duo(ops=frozenset({"write"}))
    with pytest.raises(UnsupportedError) as raised:
        duo.a.agent.read(duo.peer, [])
    assert raised.value.capability == "ops"


def test_memory_kinds_that_cannot_meet(make_duo):
    duo = make_duo(memory=frozenset({("host", "acme"), ("host", "host")}))
    device = duo.a.agent.register((4096, 100, None), name="dev", kind="acme")
    with pytest.raises(UnsupportedError, match=r"'acme'.*'host'"):
        duo.a.agent.read(duo.peer, [Pair.ranges(device, [0], duo.remote, [0], 1)])


@pytest.mark.parametrize("n", [1, 10])
def test_alignment(make_duo, n):
    duo = make_duo(min_align=4)
    good = np.arange(n) * 64
    duo.a.agent.read(duo.peer, [Pair.ranges(duo.a.region, good, duo.remote, good, 8)]).wait(1)
    duo.a.backend.posts.clear()
    for local, remote, nbytes in ((good + 2, good, 8), (good, good + 1, 8), (good, good, 6)):
        refuse(
            duo, [Pair.ranges(duo.a.region, local, duo.remote, remote, nbytes)],
            DescriptorError, "multiple of 4",
        )  # fmt: skip


class TestStale:
    def test_local_region(self, duo):
        extra = duo.a.agent.register(bytearray(10), name="x")
        duo.a.agent.deregister(extra)
        refuse(duo, [Pair.ranges(extra, [0], duo.remote, [0], 1)], StaleDescriptorError, "'x'")

    def test_local_region_of_another_agent(self, duo):
        refuse(duo, [Pair.ranges(duo.b.region, [0], duo.remote, [0], 1)], StaleDescriptorError)

    def test_remote_region_that_the_peer_withdrew(self, duo):
        duo.b.agent.deregister(duo.b.region)
        duo.b.agent.register(duo.b.memory, name="kv")
        assert duo.a.agent.add_peer(duo.b.agent.metadata()) is duo.peer
        refuse(
            duo, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)],
            StaleDescriptorError, "generation 1",
        )  # fmt: skip
        now = duo.peer.region("kv")
        assert now.generation == 2
        duo.a.agent.read(duo.peer, [Pair.ranges(duo.a.region, [0], now, [0], 1)]).wait(1)

    def test_stale_remote_region_is_found_while_planning(self, duo):
        from kvtransport.backend import Op

        duo.b.agent.deregister(duo.b.region)
        duo.a.agent.add_peer(duo.b.agent.metadata())
        with pytest.raises(StaleDescriptorError):
            duo.a.agent.prepare(
                Op.READ, duo.peer, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)]
            )

    def test_plan_made_before(self, duo):
        from kvtransport.backend import Op

        plan = duo.a.agent.prepare(
            Op.READ, duo.peer, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)]
        )
        duo.b.agent.deregister(duo.b.region)
        duo.a.agent.add_peer(duo.b.agent.metadata())
        with pytest.raises(StaleDescriptorError):
            duo.a.agent.post(plan)

    def test_regions_the_wrong_way_round(self, duo):
        refuse(
            duo, [Pair.ranges(duo.remote, [0], duo.a.region, [0], 1)],
            DescriptorError, "local region first",
        )  # fmt: skip

    def test_region_of_another_peer(self, make_duo):
        one, two = make_duo(), make_duo()
        peer = one.a.agent.add_peer(two.a.agent.metadata())
        with pytest.raises(StaleDescriptorError):
            one.a.agent.read(peer, [Pair.ranges(one.a.region, [0], one.remote, [0], 1)])


def test_busy_region_is_kept(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)])
    with pytest.raises(RegionBusyError, match="1 transfers"):
        duo.a.agent.deregister(duo.a.region)
    assert "deregister 1" not in duo.a.backend.calls
    duo.a.backend.finish_all()
    duo.a.agent.deregister(duo.a.region, drain_s=1)
    assert transfer.done


def test_something_else_than_a_pair(duo):
    refuse(duo, [(duo.a.region, duo.remote)], DescriptorError, "tuple")
