"""Peers that die, stop and come back; memory that goes away."""

from __future__ import annotations

import hashlib
import signal
import time

import pytest
from support.nixl_peer import pattern
from support.nixl_side import REMOTE, blocks, scattered

from kvtransport.backend import Op
from kvtransport.errors import PeerLostError, UnsupportedError

MIB = 1 << 20
SIZE = 4 * MIB


@pytest.mark.parametrize("op", Op)
def test_a_killed_peer_is_lost_on_next_use(pair, op):
    local, remote = pair
    assert local.run(op, scattered(4, 4096, SIZE)).error is None
    remote.kill()
    completion = local.run(op, scattered(4, 4096, SIZE))
    assert isinstance(completion.error, PeerLostError)
    assert local.lost_peers == [1]
    with pytest.raises(PeerLostError):
        local.post(op, scattered(4, 4096, SIZE))
    assert local.backend.counters()["peers_lost"] == 1


def test_transfers_in_flight_with_a_killed_peer_end_quiet(here, there):
    size = 64 * MIB
    remote = there({"transports": "tcp"}, size)
    local = here({"transports": "tcp"}, size)
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, scattered(1, 4096, size)).error is None
    tickets = [
        local.post(Op.READ, scattered(16, 256 * 1024, size, seed=seed)) for seed in range(16)
    ]
    remote.kill()
    done = local.wait(*tickets)
    assert any(isinstance(one.error, PeerLostError) for one in done)
    at_report = hashlib.blake2b(local.memory).digest()
    local.idle(1.5)
    assert hashlib.blake2b(local.memory).digest() == at_report


def test_other_peers_do_not_notice(here, there, config):
    first, second = there(config), there(config, name="second")
    local = here(config)
    local.backend.import_peer(1, first.export())
    local.backend.import_peer(2, second.export())
    first.kill()
    local.run(Op.READ, scattered(4, 4096, SIZE))
    assert local.lost_peers == [1]
    assert local.run(Op.READ, scattered(64, 4096, SIZE), peer=2).error is None
    assert local.run(Op.WRITE, scattered(64, 4096, SIZE), peer=2).error is None


def test_a_stopped_peer_keeps_transfers_in_flight(here, there):
    remote = there({"transports": "tcp"})
    local = here({"transports": "tcp"})
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, scattered(1, 4096, SIZE)).error is None
    remote.signal(signal.SIGSTOP)
    try:
        tickets = [local.post(op, scattered(64, 16384, SIZE)) for op in (Op.READ, Op.WRITE)]
        local.idle(0.5)
        assert local.completion(tickets[0]) is None
        with pytest.raises(UnsupportedError):
            local.backend.cancel(tickets[0])
    finally:
        remote.signal(signal.SIGCONT)
    assert all(done.error is None for done in local.wait(*tickets))


def test_closing_with_transfers_in_flight_neither_hangs_nor_lets_data_land(here, there):
    remote = there({"transports": "tcp"})
    local = here({"transports": "tcp"})
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, scattered(1, 4096, SIZE)).error is None
    remote.signal(signal.SIGSTOP)
    try:
        local.post(Op.READ, scattered(64, 16384, SIZE))
        local.idle(0.1)
        before = local.memory.copy()
        start = time.monotonic()
        local.backend.close()
        assert time.monotonic() - start < 5.0
    finally:
        remote.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert (local.memory == before).all()


@pytest.mark.parametrize("count", [1, 4])
def test_memory_unmapped_by_its_owner_fails_the_read(here, there, count):
    remote = there()
    local = here()
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, blocks(4096, [0], [MIB])).error is None
    remote.ask("unmap", region=REMOTE, start=0, nbytes=65536)
    offsets = [i * 4096 for i in range(count)]
    completion = local.run(Op.READ, blocks(4096, offsets, offsets))
    assert isinstance(completion.error, PeerLostError)
    # UCX gives up the connection, not the peer: importing it again mends that.
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, blocks(4096, [0], [MIB])).error is None
    assert (local.memory[:4096] == pattern(SIZE, 1)[MIB : MIB + 4096]).all()


def test_a_restarted_peer_of_the_same_name(here, there, config):
    local = here(config)
    for generation in range(1, 4):
        remote = there(config, name="decode-0")
        local.backend.import_peer(generation, remote.export())
        what = scattered(16, 4096, SIZE, seed=generation)
        assert local.run(Op.READ, what, peer=generation).error is None
        if generation > 1:
            with pytest.raises(PeerLostError):
                local.post(Op.READ, scattered(1, 4096, SIZE), peer=generation - 1)
            local.backend.drop_peer(generation - 1)
        remote.kill()
        assert local.run(Op.READ, what, peer=generation).error is not None


def test_both_directions_at_once(here, there, config):
    import base64

    remote = there(config)
    local = here(config)
    local.backend.import_peer(1, remote.export())
    body = base64.b64encode(local.backend.export()).decode()
    remote.ask("load", peer=5, body=body)
    for round_ in range(20):
        columns = [[REMOTE], [round_ * 4096], [3], [MIB + round_ * 4096], [4096]]
        remote.ask("post", ticket=round_, op="read", peer=5, blocks=columns)
        assert local.run(Op.READ, scattered(4, 4096, MIB, seed=round_)).error is None
    until = time.monotonic() + 10
    while len(remote.ask("events")["completions"]) < 20 and time.monotonic() < until:
        local.idle(0.01)
    completions = remote.ask("events")["completions"]
    assert list(completions.values()) == [None] * 20
