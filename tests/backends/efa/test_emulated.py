"""The efa backend over LIBFABRIC: TCP (level 1), emulated EFA and Neuron (level 2)."""

from __future__ import annotations

import base64
import signal
import time

import numpy as np
import pytest
from support.nixl_peer import pattern
from support.nixl_side import REMOTE, blocks, digest, move, scattered

from kvtransport.backend import Op
from kvtransport.errors import (
    HandshakeTimeoutError,
    PeerLostError,
    StaleDescriptorError,
    TransferFailedError,
)

MIB = 1 << 20
SIZE = 4 * MIB


def check(pair, op, what, notify=None):
    local, remote = pair
    ours, theirs = local.memory.copy(), pattern(SIZE, 1)
    move(op, what, ours, theirs)
    assert local.run(op, what, notify=notify).error is None
    assert digest(local.memory) == digest(ours)
    # A write is done when its source may be reused; its bytes arrive soon after.
    until = time.monotonic() + (5.0 if op is Op.WRITE else 0.0)
    while remote.digest() != digest(theirs) and time.monotonic() < until:
        local.idle(0.005)
    assert remote.digest() == digest(theirs)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("count", "block"), [(1, 4096), (64, 16384), (500, 1024), (3, MIB)])
def test_permuted_blocks_move_and_nothing_else(pair, op, count, block):
    check(pair, op, scattered(count, block, SIZE))


@pytest.mark.parametrize("op", Op)
def test_odd_lengths_and_addresses(pair, op):
    sizes = np.array([1, 63, 4097, 100_001, 130_000, 200_003])
    what = blocks(
        sizes,
        [5, 77, 9001, 300_000, 600_000, 900_000],
        [3, 1001, 70_000, 80_001, 200_001, 500_000],
    )
    check(pair, op, what)


@pytest.mark.parametrize("op", Op)
def test_counts_that_once_hung_efa(pair, op):
    local, _ = pair
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 96, 1000, 1023, 1024, 1025, 3000):
        what = scattered(count, 1024, SIZE, seed=count)
        assert local.run(op, what).error is None, count


@pytest.mark.parametrize("op", Op)
def test_notifications_arrive_whole_after_their_data(pair, op):
    local, remote = pair
    body = base64.b64encode(local.backend.export()).decode()
    remote.ask("load", peer=9, body=body)
    payloads = [b"", b"\x00", bytes(range(256)), b"x" * 7936]
    for index, payload in enumerate(payloads):
        what = scattered(4, 4096, SIZE, seed=index)
        assert local.run(op, what, notify=payload).error is None
    assert local.run(Op.WRITE, blocks(0, [], []), notify=b"alone").error is None
    got: list[bytes] = []
    for _ in range(300):
        got = [base64.b64decode(text) for text in remote.ask("events")["notifications"]]
        if len(got) > len(payloads):
            break
        local.idle(0.01)
    assert sorted(got) == sorted([*payloads, b"alone"])


def test_both_kinds_of_memory_in_one_agent(pair, kind):
    local, remote = pair
    host = pattern(MIB, 5)
    local.register(50, host)
    remote.ask("alloc", region=REMOTE + 1, nbytes=MIB, seed=6)
    remote.ask("register", region=REMOTE + 1, kind="host")
    local.backend.import_peer(1, remote.export())
    what = blocks(
        8192, [0, 8192], [4096, 0], local_region=[50, 3], remote_region=[REMOTE, REMOTE + 1]
    )
    assert local.run(Op.READ, what).error is None
    assert (host[:8192] == pattern(SIZE, 1)[4096:12288]).all()
    assert (local.memory[8192:16384] == pattern(MIB, 6)[:8192]).all()
    assert kind in local.backend.kinds(local.config)


def test_device_memory_registered_anew_at_its_address(pair, kind):
    local, remote = pair
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None
    remote.ask("deregister", region=REMOTE)
    remote.ask("rename", old=REMOTE, new=REMOTE + 1)
    remote.ask("register", region=REMOTE + 1, kind=kind)
    local.backend.import_peer(1, remote.export())
    with pytest.raises(StaleDescriptorError):
        local.post(Op.READ, scattered(4, 4096, SIZE))
    what = scattered(4, 4096, SIZE, remote_region=REMOTE + 1)
    assert local.run(Op.READ, what).error is None


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_peer_is_noticed_and_others_are_not_held_up(here, there, busy):
    first, second, local = there(), there(name="second"), here()
    local.backend.import_peer(1, first.export())
    local.backend.import_peer(2, second.export())
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None
    tickets = []
    if busy:
        tickets = [local.post(op, scattered(64, 16384, SIZE)) for op in (Op.READ, Op.WRITE)]
    first.kill()
    until = time.monotonic() + 5.0
    while local.lost_peers != [1]:
        local.poll()
        assert time.monotonic() < until
    with pytest.raises(PeerLostError):
        local.post(Op.READ, scattered(4, 4096, SIZE))
    for done in local.wait(*tickets, timeout_s=5.0):
        assert done.error is None or isinstance(done.error, PeerLostError | TransferFailedError)
    assert local.run(Op.READ, scattered(64, 4096, SIZE), peer=2).error is None
    start = time.monotonic()
    local.backend.close()
    assert time.monotonic() - start < 5.0


def test_a_stopped_peer_keeps_transfers_in_flight_and_holds_up_nobody(here, there):
    first, second, local = there(), there(name="second"), here()
    local.backend.import_peer(1, first.export())
    local.backend.import_peer(2, second.export())
    assert local.run(Op.READ, scattered(1, 4096, SIZE)).error is None
    first.signal(signal.SIGSTOP)
    try:
        tickets = [local.post(op, scattered(64, 16384, SIZE)) for op in (Op.READ, Op.WRITE)]
        local.idle(0.3)
        assert local.completion(tickets[0]) is None
        assert local.run(Op.READ, scattered(64, 4096, SIZE), peer=2).error is None
    finally:
        first.signal(signal.SIGCONT)
    assert all(done.error is None for done in local.wait(*tickets))


def test_a_peer_that_does_not_shake_hands_is_given_up_in_time(here, there):
    first, second = there(), there(name="second")
    local = here(config={"connect_timeout_s": 1.0})
    body = first.export()
    first.signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        # The kernel of a stopped process still accepts its lifelines, up to a point.
        with pytest.raises((HandshakeTimeoutError, PeerLostError)):
            local.backend.import_peer(1, body)
        assert time.monotonic() - start < 4.0
        local.backend.import_peer(2, second.export())
        assert local.run(Op.READ, scattered(4, 4096, SIZE), peer=2).error is None
    finally:
        first.signal(signal.SIGCONT)
    local.idle(0.5)
    local.backend.import_peer(1, body)
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None


def test_a_dead_peer_cannot_be_imported(here, there):
    remote, local = there(), here()
    body = remote.export()
    remote.kill()
    with pytest.raises(PeerLostError):
        local.backend.import_peer(1, body)


def test_a_restarted_peer_needs_no_new_agent(here, there):
    local = here()
    for generation in range(1, 5):
        remote = there(name="decode-0")
        local.backend.import_peer(generation, remote.export())
        what = scattered(16, 4096, SIZE, seed=generation)
        assert local.run(Op.READ, what, peer=generation).error is None
        local.events.clear()
        remote.kill()
        until = time.monotonic() + 5.0
        while local.lost_peers != [generation]:
            local.poll()
            assert time.monotonic() < until
        local.backend.drop_peer(generation)


def test_a_peer_that_computes_answers_without_polling(pair):
    local, remote = pair
    remote.ask("busy", seconds=1.5)
    assert local.run(Op.READ, scattered(16, 4096, SIZE)).error is None


def test_a_closed_agent_with_transfers_in_flight_does_not_hang(here, there):
    remote, local = there(), here()
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, scattered(1, 4096, SIZE)).error is None
    remote.signal(signal.SIGSTOP)
    try:
        local.post(Op.READ, scattered(64, 16384, SIZE))
        start = time.monotonic()
        local.backend.close()
        assert time.monotonic() - start < 5.0
    finally:
        remote.signal(signal.SIGCONT)
