"""Bytes that move, and bytes that must not."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from support.nixl_peer import pattern
from support.nixl_side import LOCAL, REMOTE, blocks, digest, move, scattered

from kvtransport.backend import Op

MIB = 1 << 20
SIZE = 4 * MIB


def check(pair, op, what, notify=None):
    """Run a transfer and compare every byte of both sides with what it should do."""
    local, remote = pair
    ours, theirs = local.memory.copy(), pattern(SIZE, 1)
    move(op, what, ours, theirs)
    completion = local.run(op, what, notify=notify)
    assert completion.error is None
    assert digest(local.memory) == digest(ours)
    assert remote.digest() == digest(theirs)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("count", "block"), [(1, 4096), (64, 16384), (500, 1024), (3, MIB)])
def test_permuted_blocks_move_and_nothing_else(fresh, op, count, block):
    check(fresh, op, scattered(count, block, SIZE))


def test_the_same_blocks_again_use_prepared_tables(pair):
    local, _ = pair
    local.run(Op.READ, scattered(64, 8192, SIZE, seed=1))
    assert local.backend._local.tables._tables == {}  # a size seen once gets no table
    local.run(Op.READ, scattered(64, 8192, SIZE, seed=1))
    assert local.backend._local.tables._tables
    local.memory[:] = pattern(SIZE, 2)
    check(pair, Op.READ, scattered(64, 8192, SIZE, seed=2))


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("rounds", [1, 2])
def test_runs_of_different_lengths(fresh, op, rounds):
    # Offsets and lengths are multiples of 4 KiB: pieces of a table, joined again.
    what = blocks(
        np.array([1, 3, 2, 5]) * 4096,
        np.array([10, 0, 20, 30]) * 4096,
        np.array([7, 100, 50, 200]) * 4096,
    )
    local, _ = fresh
    for _ in range(rounds - 1):
        local.run(Op.READ, what)
    local.memory[:] = pattern(SIZE, 2)
    check(fresh, op, what)


@pytest.mark.parametrize("op", Op)
def test_odd_lengths_and_addresses(fresh, op):
    what = blocks(
        np.array([1, 63, 4097, 100_001]), [5, 77, 9001, 300_000], [3, 1001, 70_000, 80_001]
    )
    check(fresh, op, what)


@pytest.mark.parametrize("op", Op)
def test_counts_that_once_hung_a_fabric(fresh, op):
    local, remote = fresh
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 96, 1000, 1023, 1024, 1025):
        completion = local.run(op, scattered(count, 2048, SIZE, seed=count))
        assert completion.error is None, count
    assert remote.process.poll() is None


@pytest.mark.parametrize("op", Op)
def test_a_transfer_of_many_parts_completes_once(here, there, config, op):
    remote = there(config)
    local = here({**config, "part_bytes": 64 * 1024, "post_budget_ms": 0.1})
    local.backend.import_peer(1, remote.export())
    # One descriptor longer than a part, and many shorter ones.
    sizes = np.array([MIB + 17, *[10_000] * 90])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    what = blocks(sizes, starts, starts + 4096)
    check((local, remote), op, what)
    local.idle(0.05)
    assert len(local.events) == 1


def test_regions_on_both_sides_in_one_transfer(pair):
    local, remote = pair
    second = pattern(MIB, 5)
    local.register(LOCAL + 1, second)
    remote.ask("alloc", region=REMOTE + 1, nbytes=MIB, seed=6)
    remote.ask("register", region=REMOTE + 1)
    local.backend.import_peer(1, remote.export())
    what = blocks(
        8192,
        [0, 8192, 0, 8192],
        [65536, 0, 8192, 16384],
        local_region=[LOCAL, LOCAL + 1, LOCAL + 1, LOCAL],
        remote_region=[REMOTE + 1, REMOTE, REMOTE + 1, REMOTE],
    )
    first_there, second_there = pattern(SIZE, 1), pattern(MIB, 6)
    for _ in range(2):  # by list, then by table
        assert local.run(Op.READ, what).error is None
        assert (local.memory[:8192] == second_there[65536 : 65536 + 8192]).all()
        assert (second[8192:16384] == first_there[:8192]).all()
        assert (second[:8192] == second_there[8192:16384]).all()
        assert (local.memory[8192:16384] == first_there[16384 : 16384 + 8192]).all()
        local.memory[:] = 0
        second[:] = 0


def test_many_transfers_at_once(fresh):
    local, _ = fresh
    theirs = pattern(SIZE, 1)
    each = [blocks(16384, [i * 16384], [(255 - i) * 16384]) for i in range(256)]
    tickets = [local.post(Op.READ, what) for what in each]
    assert all(done.error is None for done in local.wait(*tickets))
    assert (local.memory.reshape(256, -1) == theirs.reshape(256, -1)[::-1]).all()


PAYLOADS = [b"", b"\x00", bytes(range(256)), b"x" * 7936]


@pytest.mark.parametrize("op", Op)
def test_notifications_arrive_whole_after_their_data(fresh, op):
    local, remote = fresh
    body = local.backend.export()
    remote.ask("load", peer=9, body=base64.b64encode(body).decode())
    for index, payload in enumerate(PAYLOADS):
        assert local.run(op, scattered(4, 4096, SIZE, seed=index), notify=payload).error is None
    got = wait_for_notifications(local, remote, len(PAYLOADS))
    assert sorted(got) == sorted(PAYLOADS)


def test_notifications_without_data_and_before_the_introduction(pair):
    local, remote = pair
    nothing = blocks(0, [], [])
    assert local.run(Op.WRITE, nothing, notify=b"early").error is None
    remote.ask("events")
    remote.ask("load", peer=9, body=base64.b64encode(local.backend.export()).decode())
    assert local.run(Op.WRITE, nothing, notify=b"late").error is None
    assert sorted(wait_for_notifications(local, remote, 2)) == [b"early", b"late"]
    assert digest(local.memory) == digest(pattern(SIZE, 2))


def wait_for_notifications(local, remote, count):
    got: list[bytes] = []
    for _ in range(200):
        got = [base64.b64decode(text) for text in remote.ask("events")["notifications"]]
        if len(got) >= count:
            break
        local.idle(0.01)
    return got


def test_a_peer_that_computes_answers_without_polling(here, there):
    """NIXL's progress thread serves it: over TCP every byte needs the owner's help."""
    remote = there({"transports": "tcp"})
    local = here({"transports": "tcp"})
    local.backend.import_peer(1, remote.export())
    remote.ask("busy", seconds=1.5)
    assert local.run(Op.READ, scattered(16, 4096, SIZE)).error is None
