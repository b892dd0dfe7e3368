"""A region that is gone is never read or written, and no stale byte is counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from support.host_pair import Pair, Remote, blocks, pattern

from kvtransport.backend import Op
from kvtransport.errors import (
    DescriptorError,
    KVTransportError,
    OutOfBoundsError,
    PeerLostError,
    RegistrationError,
    RegistrationLimitError,
    StaleDescriptorError,
    TransferFailedError,
    UnsupportedError,
)
from kvtransport.layout.blocks import Pair as Descriptors
from kvtransport.transfer import TransferState

MIB = 1 << 20


def whole(pair: Pair, nbytes: int = MIB) -> list[object]:
    ranges = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("kv"), [0], [nbytes])
    return [ranges]


@pytest.fixture
def pair(make_pair: Callable[..., Pair], path: str) -> Pair:
    pair = make_pair({"path": path, "stall_timeout_s": 2.0})
    pair.remote.call("register", name="kv", nbytes=MIB, seed=1)
    pair.here = pair.memory("mine", MIB, fill=9)
    pair.connect()
    return pair


@pytest.mark.parametrize("op", ["read", "write"])
def test_deregistered_region_is_stale(pair: Pair, op: str) -> None:
    pair.remote.call("deregister", name="kv")
    pair.remote.call("set", name="kv", value=7)
    before = pair.remote.call("digest", name="kv")
    transfer = getattr(pair.agent, op)(pair.peer, whole(pair))
    with pytest.raises(StaleDescriptorError):
        transfer.wait(20)
    assert transfer.state is TransferState.FAILED
    assert pair.remote.call("digest", name="kv") == before
    assert (pair.here == 9).all()  # known to be stale before anything was copied
    counters = pair.counters()
    assert not any(counters[f"{way}_{op}_bytes"] for way in ("vm", "tcp"))


@pytest.mark.parametrize("op", ["read", "write"])
def test_registered_again_in_the_same_place_is_another_region(pair: Pair, op: str) -> None:
    old = whole(pair)
    pair.remote.call("deregister", name="kv")
    pair.remote.call("register_again", name="kv")
    with pytest.raises(StaleDescriptorError):
        getattr(pair.agent, op)(pair.peer, old).wait(20)
    # The newer export makes it work again, and without a new connection.
    pair.connect()
    getattr(pair.agent, op)(pair.peer, whole(pair)).wait(20)


def test_reader_never_counts_bytes_written_after_withdrawal(make_pair: Callable[..., Pair]) -> None:
    """The owner withdraws and overwrites all the time; whatever is DONE is whole."""
    pair = make_pair({"path": "vm"})
    pair.remote.call("register", name="kv", nbytes=4 * MIB)
    here = pair.memory("mine", 4 * MIB)
    pair.remote.call("deregister", name="kv")
    done = stale = 0
    for _ in range(30):
        pair.remote.call("set", name="kv", value=1)
        pair.remote.call("register_again", name="kv")
        pair.connect()
        descriptors = whole(pair, 4 * MIB)
        pair.remote.send("deregister", name="kv")
        pair.remote.send("set", name="kv", value=2)
        for _ in range(6):
            here[:] = 0
            transfer = pair.agent.read(pair.peer, descriptors)
            try:
                transfer.wait(20)
            except StaleDescriptorError:
                stale += 1
                break
            done += 1
            assert (here == 1).all()
        pair.remote.answer()
        pair.remote.answer()
    assert stale


@pytest.mark.parametrize("path", ["vm"], indirect=True)
def test_read_of_a_withdrawn_region_is_discarded_afterwards(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look decides: withdraw exactly between the copy and its end."""
    lane = pair.backend._peers[pair.peer.peer_id].lane
    step = lane.vm.step

    def step_then_withdraw(*args: object) -> None:
        step(*args)
        pair.remote.call("deregister", name="kv")

    monkeypatch.setattr(lane.vm, "step", step_then_withdraw)
    with pytest.raises(StaleDescriptorError):
        pair.agent.read(pair.peer, whole(pair)).wait(20)
    assert pair.counters()["vm_read_bytes"] == 0


def test_deregister_during_a_tcp_read_answers_stale(make_pair: Callable[..., Pair]) -> None:
    """Withdrawn while it is being sent: zeros follow, then the refusal."""
    pair = make_pair({"path": "tcp", "chunk_bytes": 65536})
    n = 128 * MIB
    pair.remote.call("register", name="kv", nbytes=n)
    pair.remote.call("set", name="kv", value=1)
    here = pair.memory("mine", n)
    pair.connect()
    transfer = pair.agent.read(pair.peer, whole(pair, n))
    while not here[0]:
        time.sleep(0)
    pair.remote.call("deregister", name="kv")
    with pytest.raises(StaleDescriptorError):
        transfer.wait(20)
    # The connection may be used again or replaced: either way the next one works.
    pair.remote.call("register_again", name="kv")
    pair.connect()
    pair.agent.read(pair.peer, whole(pair, n)).wait(20)


@pytest.mark.parametrize("op", ["read", "write"])
def test_deregister_in_flight_moves_nothing_after_it_returned(
    make_pair: Callable[..., Pair], path: str, op: str
) -> None:
    pair = make_pair({"path": path})
    n = 128 * MIB
    pair.remote.call("register", name="kv", nbytes=n)
    pair.remote.call("set", name="kv", value=1)
    here = pair.memory("mine", n, fill=3)
    pair.connect()
    transfer = getattr(pair.agent, op)(pair.peer, whole(pair, n))
    pair.remote.call("deregister", name="kv")
    pair.remote.call("set", name="kv", value=2)
    before = pair.remote.call("digest", name="kv")
    try:
        transfer.wait(20)
    except StaleDescriptorError:
        pass
    else:
        assert op == "write" or (here == 1).all()
    assert pair.remote.call("digest", name="kv") == before


@pytest.mark.parametrize("op", ["read", "write"])
def test_unmapped_memory_is_an_error_and_harms_nobody(pair: Pair, op: str) -> None:
    pair.remote.call("register", name="other", nbytes=MIB, seed=5)
    pair.connect()
    pair.remote.call("unmap", name="kv")
    with pytest.raises(TransferFailedError):
        getattr(pair.agent, op)(pair.peer, whole(pair)).wait(20)
    other = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("other"), [0], [MIB])
    pair.agent.read(pair.peer, [other]).wait(20)


def test_restart_on_the_same_name(
    make_remote: Callable[..., Remote], make_agent: Callable, path: str
) -> None:
    agent = make_agent({"path": path})
    here = np.zeros(MIB, np.uint8)
    local = agent.register(here, name="mine")
    peers = []
    for seed in (1, 2):
        remote = make_remote({"path": path})
        remote.call("register", name="kv", nbytes=MIB, seed=seed)
        peers.append(agent.add_peer(bytes.fromhex(remote.call("export"))))
        ranges = Descriptors.ranges(local, [0], peers[-1].region("kv"), [0], [MIB])
        agent.read(peers[-1], [ranges]).wait(20)
        assert (here == pattern(seed, MIB)).all()
        if seed == 1:
            remote.kill()
    old = Descriptors.ranges(local, [0], peers[0].region("kv"), [0], [MIB])
    with pytest.raises((StaleDescriptorError, PeerLostError)):
        agent.read(peers[0], [old]).wait(20)
    assert (here == pattern(2, MIB)).all()


def test_restart_on_the_same_address(
    make_remote: Callable[..., Remote], make_agent: Callable
) -> None:
    """Another agent at the old address has another token: it is never read."""
    first = make_remote({"path": "tcp"})
    first.call("register", name="kv", nbytes=MIB, seed=1)
    agent = make_agent({"path": "tcp", "handshake_timeout_s": 2.0})
    local = agent.register(np.zeros(MIB, np.uint8), name="mine")
    peer = agent.add_peer(bytes.fromhex(first.call("export")))
    address = agent._backend._peers[peer.peer_id].lane._body.address
    ranges = Descriptors.ranges(local, [0], peer.region("kv"), [0], [MIB])
    first.kill()
    second = make_remote({"path": "tcp", "listen": address})
    second.call("register", name="kv", nbytes=MIB, seed=2)
    with pytest.raises((PeerLostError, StaleDescriptorError)):
        agent.read(peer, [ranges]).wait(20)


# -- the backend alone: what the core would have refused before --------------


def run(pair: Pair, op: Op, *descriptors: object) -> KVTransportError | None:
    """Post past the core's checks and return the completion's error."""
    pair.backend.post(77, op, pair.peer.peer_id, blocks(*descriptors), None)
    for _ in range(2000):
        for event in pair.backend.poll():
            if getattr(event, "ticket", None) == 77:
                return event.error
        pair.remote.call("collect")
    raise AssertionError("no completion")


@pytest.mark.parametrize(("offset", "nbytes"), [(MIB, 1), (MIB - 1, 2), (2**64 - 1, 2), (0, 0)])
@pytest.mark.parametrize("op", list(Op))
def test_out_of_bounds_is_refused_before_anything_moves(
    pair: Pair, op: Op, offset: int, nbytes: int
) -> None:
    mine, kv = pair.local["mine"].region_id, pair.peer.region("kv").region_id
    for descriptor in (([0], kv, [offset]), ([offset], kv, [0])):
        with pytest.raises(OutOfBoundsError):
            run(pair, op, mine, *descriptor, [nbytes])


@pytest.mark.parametrize(
    ("path", "op"),
    [("tcp", Op.READ), ("tcp", Op.WRITE), ("vm", Op.WRITE)],  # a vm READ asks nobody
    indirect=["path"],
)
def test_forged_table_is_refused_by_the_target(pair: Pair, op: Op) -> None:
    """The initiator believes in a larger region than the target has."""
    peer = pair.backend._peers[pair.peer.peer_id]
    peer.table._nbytes = peer.table._nbytes * np.uint64(4)
    mine, kv = pair.local["mine"].region_id, pair.peer.region("kv").region_id
    before = pair.remote.call("digest", name="kv")
    assert isinstance(run(pair, op, mine, [0], kv, [MIB - 4], [4096]), OutOfBoundsError)
    assert run(pair, op, mine, [0], kv, [0], [4096]) is None
    assert op is Op.READ or pair.remote.call("digest", name="kv") != before


@pytest.mark.parametrize("op", list(Op))
def test_access_is_refused_by_both_sides(make_pair: Callable[..., Pair], path: str, op: Op) -> None:
    pair = make_pair({"path": path})
    access = {Op.READ: "w", Op.WRITE: "r"}[op]
    pair.remote.call("register", name="kv", nbytes=MIB, access=access)
    pair.memory("mine", MIB)
    pair.connect()
    mine, kv = pair.local["mine"].region_id, pair.peer.region("kv").region_id
    with pytest.raises(DescriptorError, match="does not allow"):
        run(pair, op, mine, [0], kv, [0], [4096])
    if path == "tcp":
        peer = pair.backend._peers[pair.peer.peer_id]
        peer.table._access[:] = 3
        assert isinstance(run(pair, op, mine, [0], kv, [0], [4096]), DescriptorError)


def test_registration_errors(make_agent: Callable) -> None:
    agent = make_agent({"max_regions": 2})
    buffer = bytearray(64)
    first = agent.register(buffer, name="a")
    agent.register(bytearray(64), name="b")
    with pytest.raises(RegistrationLimitError):
        agent.register(bytearray(64), name="c")
    agent.deregister(first)
    agent.register(bytearray(64), name="c")
    with pytest.raises(RegistrationError):
        agent._backend.deregister(first.region_id)
    with pytest.raises(UnsupportedError):
        agent.register((4096, 64, None), name="gpu", kind="cuda")
