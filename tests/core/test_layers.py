"""Layers around the test backend."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from support.loopback import CAPABILITIES, Loopback, LoopbackConfig

from kvtransport.agent import Agent
from kvtransport.backend import Op
from kvtransport.errors import (
    BackpressureError,
    ConfigError,
    DescriptorError,
    IntegrityError,
    PeerLostError,
    TransferFailedError,
    TransferTimeoutError,
    UnsupportedError,
)
from kvtransport.layers.checksum import ChecksumLayer
from kvtransport.layers.emulate_read import EmulateReadLayer
from kvtransport.layers.fault import FaultLayer, FaultPlan
from kvtransport.layers.staging import StagingLayer
from kvtransport.layers.staging_plan import StagingPlan
from kvtransport.layout.blocks import BlockTable, Pair
from kvtransport.plan import EMPTY
from kvtransport.transfer import TransferState

SIZE = 1 << 14


class World:
    """A layered agent and a plain one."""

    def __init__(self, wrap, kind="host", access="rw", options=None, **capabilities):
        self.inner = Loopback()
        self.layer = wrap(self.inner)
        config = LoopbackConfig(replace(CAPABILITIES, **capabilities))
        self.agent = Agent(self.layer, name="here", config=config, options=options)
        self.other = Agent(Loopback(), name="there", config=config)
        self.memory = np.zeros(SIZE, np.uint8)
        self.far = np.random.default_rng(1).integers(1, 255, SIZE, dtype=np.uint8)
        address = (self.memory.ctypes.data, SIZE, self.memory)
        self.region = self.agent.register(address, name="kv", kind=kind, access=access)
        self.other.register(self.far, name="kv")
        self.peer = self.agent.add_peer(self.other.metadata())
        self.other.add_peer(self.agent.metadata())

    def pairs(self, local=0, remote=0, nbytes=100):
        return [Pair.ranges(self.region, [local], self.peer.region("kv"), [remote], nbytes)]


@pytest.fixture
def world():
    made = []

    def build(*args, **kwargs):
        made.append(World(*args, **kwargs))
        return made[-1]

    yield build
    for one in made:
        one.inner.held = False
        for agent in (one.agent, one.other):
            agent.close(drain_s=1)


def drive(world, transfers, seconds=10):
    until = time.monotonic() + seconds
    events = []
    while not all(t.done for t in transfers):
        assert time.monotonic() < until
        events += world.agent.poll()
    return events + world.agent.poll()


class TestFaults:
    def make(self, world, options=None, **plan):
        return world(lambda inner: FaultLayer(inner, FaultPlan(**plan)), options=options)

    def test_fail_after(self, world):
        w = self.make(world, fail_after=2)
        transfers = [w.agent.read(w.peer, w.pairs(i * 100)) for i in range(4)]
        drive(w, transfers)
        assert [t.state.value for t in transfers] == ["done", "done", "failed", "failed"]
        assert w.layer.counters()["fault_fail"] == 2

    def test_a_failed_write_announces_nothing(self, world):
        w = self.make(world, fail_after=0)
        with pytest.raises(TransferFailedError, match="injected"):
            w.agent.write(w.peer, w.pairs(), notify=b"lie").wait(1)
        assert w.other.notifications() == []

    def test_delay_and_reorder_keep_every_completion(self, world):
        w = self.make(world, seed=5, delay_polls=6, reorder=True)
        transfers = [w.agent.read(w.peer, w.pairs(i * 100)) for i in range(20)]
        events = drive(w, transfers)
        order = [e.transfer.transfer_id for e in events]
        assert sorted(order) == [t.transfer_id for t in transfers]
        assert order != sorted(order)
        assert w.agent.stats().contract_errors == 0

    def test_duplicates_are_caught_by_the_core(self, world):
        w = self.make(world, duplicate_rate=1.0)
        transfers = [w.agent.read(w.peer, w.pairs(i * 100)) for i in range(5)]
        assert len(drive(w, transfers)) == 5
        assert w.agent.stats().contract_errors == 5

    def test_dropped_completions_end_in_quarantine(self, world):
        w = self.make(world, drop_rate=1.0, options={"drain_s": 0.02})
        transfer = w.agent.read(w.peer, w.pairs(), deadline_s=0.01)
        drive(w, [transfer])
        assert transfer.state is TransferState.QUARANTINED
        assert w.agent.quarantined_bytes == 100
        w.agent._regions.by_id[1].quarantined_bytes = 0  # lets the fixture close

    def test_refusals(self, world):
        w = self.make(world, refuse_first=2)
        for _ in range(2):
            with pytest.raises(BackpressureError):
                w.agent.read(w.peer, w.pairs())
        w.agent.read(w.peer, w.pairs()).wait(1)

    def test_peer_down(self, world):
        w = self.make(world, peer_down_after=1)
        transfer = w.agent.read(w.peer, w.pairs())
        w.agent.poll()
        with pytest.raises(PeerLostError):
            w.agent.read(w.peer, w.pairs())
        assert transfer.done

    def test_same_seed_same_faults(self, world):
        outcomes = []
        for _ in range(2):
            w = self.make(world, seed=11, fail_rate=0.5)
            transfers = [w.agent.read(w.peer, w.pairs(i * 100)) for i in range(30)]
            drive(w, transfers)
            outcomes.append([t.state for t in transfers])
        assert outcomes[0] == outcomes[1]
        assert len(set(outcomes[0])) == 2

    def test_rates_are_checked(self):
        with pytest.raises(ConfigError, match="drop_rate"):
            FaultPlan(drop_rate=2)


class TestChecksum:
    def test_good_transfers_pass(self, world):
        w = world(ChecksumLayer)
        w.agent.read(w.peer, w.pairs(10, 20, 3000)).wait(1)
        assert np.array_equal(w.memory[10:3010], w.far[20:3020])
        w.agent.write(w.peer, w.pairs(10, 5000, 30), notify=b"x").wait(1)
        assert [e.payload for e in w.other.notifications()] == [b"x"]
        assert w.layer.counters()["checksum_verified"] == 2

    def test_large_transfers_are_cut(self, world):
        w = world(lambda inner: ChecksumLayer(inner, scratch_bytes=1000))
        w.agent.read(w.peer, w.pairs(0, 0, SIZE)).wait(1)
        assert np.array_equal(w.memory, w.far)
        assert w.layer.verified == 17

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_a_dropped_tail_is_found(self, world, op):
        w = world(ChecksumLayer)
        move = w.inner._move

        def short(which, other, blocks):
            if len(w.inner.posts) == 1:
                blocks = replace(blocks, nbytes=blocks.nbytes - np.uint64(1))
            move(which, other, blocks)

        w.inner._move = short
        w.memory[:] = 9
        transfer = getattr(w.agent, op)(w.peer, w.pairs(), notify=b"n")
        with pytest.raises(IntegrityError, match="CRC-32"):
            transfer.wait(1)
        assert w.other.notifications() == []

    def test_memory_changed_during_the_read_is_found(self, world):
        w = world(ChecksumLayer)
        w.inner.held = True
        transfer = w.agent.read(w.peer, w.pairs())
        w.inner.finish_all()
        w.far[:100] = 0
        w.agent.poll()
        w.inner.finish_all()
        with pytest.raises(IntegrityError):
            transfer.wait(1)

    def test_needs_read(self, world):
        w = world(ChecksumLayer, ops=frozenset({"write"}))
        with pytest.raises(UnsupportedError):
            w.agent.write(w.peer, w.pairs())


class TestStaging:
    def make(self, world, slots=2, slot_bytes=1000, wait_s=5.0, **options):
        self.copies = []

        def to_device(spec, offset, data):
            self.copies.append(("to", offset, len(data)))
            w.memory[offset : offset + len(data)] = data

        def to_host(spec, offset, data):
            self.copies.append(("from", offset, len(data)))
            data[:] = w.memory[offset : offset + len(data)]

        plan = StagingPlan(frozenset({"acme"}), to_device, to_host, slots, slot_bytes, wait_s)
        w = world(lambda inner: StagingLayer(inner, plan), kind="acme", access="", **options)
        return w

    def test_read_and_write(self, world):
        w = self.make(world)
        w.agent.read(w.peer, w.pairs(50, 70, 900)).wait(1)
        assert np.array_equal(w.memory[50:950], w.far[70:970])
        w.memory[:10] = 3
        w.agent.write(w.peer, w.pairs(0, 200, 10), notify=b"w").wait(1)
        assert (w.far[200:210] == 3).all()
        assert [e.payload for e in w.other.notifications()] == [b"w"]
        assert [c[0] for c in self.copies] == ["to", "from"]
        assert w.layer.free_slots == 2

    def test_any_size_moves_in_waves(self, world):
        w = self.make(world)
        rng = np.random.default_rng(2)
        local, remote = rng.permutation(16) * 1024, rng.permutation(16) * 1024
        pairs = [Pair.ranges(w.region, local, w.peer.region("kv"), remote, 1024)]
        w.agent.read(w.peer, pairs).wait(2)
        assert np.array_equal(w.memory.reshape(16, 1024)[local // 1024],
                              w.far.reshape(16, 1024)[remote // 1024])  # fmt: skip
        assert w.layer.free_slots == 2
        assert max(c[2] for c in self.copies) <= 1000

    def test_the_extra_one_waits_its_turn(self, world):
        w = self.make(world)
        w.inner.held = True
        transfers = [w.agent.read(w.peer, w.pairs(i * 100)) for i in range(3)]
        assert len(w.inner.open_posts) == 2
        assert w.layer.free_slots == 0
        w.inner.finish_all()
        w.agent.poll()
        assert [t.done for t in transfers] == [True, True, False]
        w.inner.finish_all()
        transfers[2].wait(1)

    def test_waiting_has_a_deadline(self, world):
        w = self.make(world, wait_s=0.01)
        w.inner.held = True
        for i in range(2):
            w.agent.read(w.peer, w.pairs(i * 100))
        late = w.agent.read(w.peer, w.pairs(500))
        with pytest.raises(TransferTimeoutError, match=r"no staging slot.*2 slots of 1000 bytes"):
            late.wait(5)
        assert late.state is TransferState.FAILED
        w.inner.finish_all()

    def test_waiting_can_be_cancelled(self, world):
        w = self.make(world)
        w.inner.held = True
        for i in range(2):
            w.agent.read(w.peer, w.pairs(i * 100))
        late = w.agent.read(w.peer, w.pairs(500))
        late.cancel()
        w.agent.poll()
        assert late.state is TransferState.CANCELLED
        w.inner.finish_all()

    def test_one_post_beyond_a_slot_is_refused_at_once(self, world):
        from kvtransport.backend import Op

        w = self.make(world)
        (part, *_) = w.agent.prepare(Op.READ, w.peer, w.pairs(nbytes=1000)).parts
        part = replace(part, nbytes=part.nbytes + np.uint64(1))
        with pytest.raises(DescriptorError, match=r"needs 1001 bytes.*1000"):
            w.layer.post(1 << 40, Op.READ, w.peer.peer_id, part, None)

    def test_failures_give_the_slot_back(self, world):
        w = self.make(world)
        w.inner.held = True
        for i in range(50):
            transfer = w.agent.read(w.peer, w.pairs(i * 10))
            w.inner.finish(next(iter(w.inner.open_posts)), TransferFailedError("no"))
            with pytest.raises(TransferFailedError):
                transfer.wait(1)
        assert w.layer.free_slots == 2
        assert self.copies == []

    def test_copy_that_fails(self, world):
        w = self.make(world)

        def broken(*_):
            raise RuntimeError("device lost")

        w.layer.plan = replace(w.layer.plan, to_device=broken, to_host=broken)
        with pytest.raises(TransferFailedError, match="device lost"):
            w.agent.read(w.peer, w.pairs()).wait(1)
        with pytest.raises(TransferFailedError, match="device lost"):
            w.agent.write(w.peer, w.pairs())
        assert w.layer.free_slots == 2

    def test_host_memory_goes_direct(self, world):
        w = self.make(world)
        with w.agent.register(np.zeros(4096, np.uint8), name="host") as host:
            pairs = [Pair.ranges(host, [0], w.peer.region("kv"), [0], 900)]
            w.agent.read(w.peer, pairs).wait(1)
        assert self.copies == []

    def test_peers_cannot_reach_staged_memory(self, world):
        w = self.make(world)
        with pytest.raises(UnsupportedError, match="access=''"):
            w.agent.register((4096, 8, None), name="x", kind="acme")

    def test_plan_is_checked(self):
        for values in ({"kinds": frozenset()}, {"slots": 0}, {"slot_bytes": 0}):
            good = {"kinds": frozenset({"a"}), "to_device": print, "to_host": print}
            with pytest.raises(ConfigError):
                StagingPlan(**{**good, **values})


class TestEmulatedRead:
    @pytest.fixture
    def two(self):
        config = LoopbackConfig(replace(CAPABILITIES, ops=frozenset({"write"})))
        agents, memories = [], []
        for name in ("here", "there"):
            agent = Agent(EmulateReadLayer(Loopback()), name=name, config=config)
            memory = np.random.default_rng(len(name)).integers(0, 255, SIZE, dtype=np.uint8)
            agent.register(memory, name="kv", access="rw" if name == "here" else "r")
            agents.append(agent)
            memories.append(memory)
        here, there = agents
        peer = here.add_peer(there.metadata())
        there.add_peer(here.metadata())
        yield here, there, peer, memories
        for agent in agents:
            agent.close(drain_s=1)

    def read(self, two, notify=None):
        here, there, peer, _ = two
        rng = np.random.default_rng(0)
        index = rng.permutation(64)
        mine = BlockTable(here.regions[0], 0, 256, 256, 64)
        theirs = BlockTable(peer.region("kv"), 0, 256, 256, 64)
        transfer = here.read(peer, [Pair.blocks(mine, theirs, index, index[::-1])], notify=notify)
        until = time.monotonic() + 10
        while not transfer.done:
            assert time.monotonic() < until
            there.poll()
            here.poll()
        return transfer, index

    def test_reads_many_blocks_in_several_requests(self, two):
        transfer, index = self.read(two, notify=b"thanks")
        transfer.wait(0)
        mine, theirs = (memory.reshape(64, 256) for memory in two[3])
        assert np.array_equal(mine[index], theirs[index[::-1]])
        assert [e.payload for e in two[1].notifications()] == [b"thanks"]

    def test_the_owner_refuses_what_it_does_not_have(self, two):
        _, there, _, memories = two
        before = memories[0].copy()
        there.deregister(there.regions[0])
        transfer, _ = self.read(two)
        with pytest.raises(TransferFailedError, match="not readable"):
            transfer.wait(0)
        assert np.array_equal(memories[0], before)

    def test_the_owner_checks_bounds_itself(self, two):
        here, there, peer, _ = two
        layer = here._backend
        plan = here.prepare(Op.READ, peer, [
            Pair.ranges(here.regions[0], [0], peer.region("kv"), [SIZE - 10], 10)
        ])  # fmt: skip
        (part,) = plan.parts
        for field, value in (("remote_offset", SIZE - 9), ("remote_offset", (1 << 64) - 8),
                             ("nbytes", 1 << 40), ("nbytes", 0)):  # fmt: skip
            bad = replace(part, **{field: np.array([value], np.uint64)})
            layer.post(1 << 40, Op.READ, peer.peer_id, bad, None)
            there.poll()
            (event,) = layer.poll()
            assert isinstance(event.error, TransferFailedError)
        assert there._backend.refused == 4

    def test_garbage_messages_are_counted(self, two):
        here, there, peer, _ = two
        for payload in (b"", b"\x01", b"\x01\xff", b"\x02\x92\x01\xa0", b"\x09"):
            here._backend.inner.post(1 << 61, Op.WRITE, peer.peer_id, EMPTY, payload)
        there.poll()
        assert there._backend.refused >= 3
        assert there.notifications() == []

    def test_user_messages_pass(self, two):
        here, there, peer, _ = two
        here.notify(peer, b"\x01looks like a request").wait(1)
        assert [e.payload for e in there.notifications()] == [b"\x01looks like a request"]

    def test_needs_ordered_notifications(self):
        config = LoopbackConfig(replace(CAPABILITIES, notify_after_data=False))
        with pytest.raises(ConfigError):
            Agent(EmulateReadLayer(Loopback()), name="x", config=config)
