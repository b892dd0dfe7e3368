"""A peer that dies or freezes is a bounded, typed end, and harms no other peer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.host_pair import Pair, Remote, pattern

from kvtransport.agent import Agent
from kvtransport.errors import PeerLostError, TransferTimeoutError
from kvtransport.events import PeerLostEvent
from kvtransport.layout.blocks import Pair as Descriptors
from kvtransport.transfer import Transfer, TransferState

MIB = 1 << 20
BIG = 128 * MIB
FAST = {"stall_timeout_s": 1.0, "handshake_timeout_s": 1.0}


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def connected(make_pair: Callable[..., Pair], config: dict, nbytes: int) -> Pair:
    pair = make_pair({**FAST, **config})
    pair.remote.call("register", name="kv", nbytes=nbytes)
    pair.remote.call("set", name="kv", value=5)
    pair.memory("mine", nbytes)
    pair.connect()
    return pair


def post(pair: Pair, op: str, nbytes: int, notify: bytes | None = None) -> Transfer:
    ranges = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("kv"), [0], [nbytes])
    transfer: Transfer = getattr(pair.agent, op)(pair.peer, [ranges], notify=notify)
    return transfer


@pytest.mark.parametrize("op", ["read", "write"])
def test_killed_in_the_middle(make_pair: Callable[..., Pair], path: str, op: str) -> None:
    pair = connected(make_pair, {"path": path}, BIG)
    transfers = [post(pair, op, BIG) for _ in range(20)]
    until(lambda: transfers[0].poll() is TransferState.DONE)
    pair.remote.kill()
    for transfer in transfers:
        until(lambda transfer=transfer: transfer.poll().terminal)
    assert transfers[-1].state is TransferState.FAILED
    assert isinstance(transfers[-1].error, PeerLostError)


def test_death_of_an_idle_peer_is_reported(make_pair: Callable[..., Pair], path: str) -> None:
    pair = connected(make_pair, {"path": path}, MIB)
    pair.remote.kill()
    events: list[object] = []

    def lost() -> bool:
        events.extend(pair.agent.poll())
        return any(isinstance(event, PeerLostEvent) for event in events)

    until(lost)


def test_closing_of_a_living_peer_is_noticed(make_pair: Callable[..., Pair], path: str) -> None:
    """The process lives on, only its agent is closed: memory must not be read any more."""
    pair = connected(make_pair, {"path": path}, MIB)
    pair.remote.call("close")
    with pytest.raises(PeerLostError):
        post(pair, "read", MIB).wait(20)


def test_frozen_peer_is_still_readable_by_vm(make_pair: Callable[..., Pair]) -> None:
    pair = connected(make_pair, {"path": "vm"}, 8 * MIB)
    pair.remote.freeze()
    post(pair, "read", 8 * MIB).wait(20)


def test_frozen_peer_ends_a_tcp_read(make_pair: Callable[..., Pair]) -> None:
    pair = connected(make_pair, {"path": "tcp"}, 64 * MIB)
    post(pair, "read", MIB).wait(20)
    pair.remote.freeze()
    transfers = [post(pair, "read", 64 * MIB) for _ in range(5)]
    for transfer in transfers:
        with pytest.raises(PeerLostError):
            transfer.wait(20)
    pair.remote.thaw()
    post(pair, "read", 64 * MIB).wait(20)


@pytest.mark.parametrize("nbytes", [4096, 64 * MIB])
def test_write_to_a_frozen_peer_is_not_over_before_it_wakes(
    make_pair: Callable[..., Pair], path: str, nbytes: int
) -> None:
    """What it was sent it may still store: so no verdict, then the true one."""
    pair = connected(make_pair, {"path": path}, nbytes)
    post(pair, "write", nbytes).wait(20)
    pair.remote.freeze()
    transfer = post(pair, "write", nbytes)
    behind = post(pair, "write", nbytes)
    until(lambda: behind.poll().terminal)  # fails early: it was never sent
    assert behind.state is TransferState.FAILED
    assert not transfer.poll().terminal
    pair.remote.thaw()
    until(lambda: transfer.poll().terminal)
    before = pair.remote.call("digest", name="kv")
    pair.remote.call("collect")
    assert pair.remote.call("digest", name="kv") == before
    post(pair, "write", nbytes).wait(20)


def test_write_to_a_frozen_peer_is_pinned_after_its_deadline(
    make_pair: Callable[..., Pair], path: str
) -> None:
    pair = connected(make_pair, {"path": path}, MIB)
    post(pair, "write", MIB).wait(20)
    pair.remote.freeze()
    transfer = post(pair, "write", MIB)
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.2)
    assert transfer.state is TransferState.DRAINING
    pair.remote.kill()
    until(lambda: transfer.poll().terminal)
    assert transfer.state is not TransferState.QUARANTINED


def test_notification_to_a_frozen_peer_is_not_lost_by_a_false_failure(
    make_pair: Callable[..., Pair], path: str
) -> None:
    pair = connected(make_pair, {"path": path}, MIB)
    post(pair, "write", MIB, b"first").wait(20)
    pair.remote.freeze()
    transfer = pair.agent.notify(pair.peer, b"second")
    until(lambda: not pair.backend._peers[pair.peer.peer_id].lane._queue)
    time.sleep(1.5)  # longer than the stall timeout
    assert not transfer.poll().terminal
    pair.remote.thaw()
    transfer.wait(20)
    assert transfer.state is TransferState.DONE
    bodies = [body for _, body in pair.remote.call("notifications")]
    assert bodies == [b"first".hex(), b"second".hex()]


def test_frozen_peer_does_not_hold_up_another(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent], path: str
) -> None:
    config = {"path": path, "stall_timeout_s": 30.0}
    agent = make_agent(config)
    here = np.zeros(MIB, np.uint8)
    local = agent.register(here, name="mine")
    peers = []
    remotes = [make_remote(config, name) for name in ("frozen", "healthy")]
    for remote in remotes:
        remote.call("register", name="kv", nbytes=MIB, seed=1)
        peers.append(agent.add_peer(bytes.fromhex(remote.call("export"))))
    warm = [Descriptors.ranges(local, [0], peers[0].region("kv"), [0], [MIB])]
    agent.write(peers[0], warm).wait(20)
    remotes[0].freeze()
    stuck = [agent.write(peers[0], warm) for _ in range(8)]
    for _ in range(50):
        ranges = Descriptors.ranges(local, [0], peers[1].region("kv"), [0], [MIB])
        agent.read(peers[1], [ranges]).wait(5)
    assert (here == pattern(1, MIB)).all()
    assert not any(transfer.poll().terminal for transfer in stuck)
    remotes[0].kill()
    for transfer in stuck:
        until(lambda transfer=transfer: transfer.poll().terminal)


@pytest.mark.parametrize("op", ["read", "write"])
def test_initiator_killed_leaves_the_target_usable(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent], path: str, op: str
) -> None:
    """The process here is the target; the other dies with its request half done."""
    agent = make_agent({"path": path, **FAST})
    region = agent.register(np.zeros(BIG, np.uint8), name="kv")
    for _ in range(2):
        other = make_remote({"path": path, **FAST})
        other.call("register", name="mine", nbytes=BIG)
        other.call("add_peer", blob=agent.metadata().hex())
        other.call("post", op=op, peer="here", local="mine", remote="kv", nbytes=BIG)
        other.kill()
    agent.deregister(region)
    survivor = make_remote({"path": path, **FAST})
    region = agent.register(np.full(MIB, 7, np.uint8), name="kv")
    survivor.call("register", name="mine", nbytes=MIB)
    survivor.call("add_peer", blob=agent.metadata().hex())
    survivor.call("post", op="read", peer="here", local="mine", remote="kv", nbytes=MIB)
    assert survivor.call("wait") == "done"
    until(lambda: len(agent._backend._server._served) <= 1)


def test_child_forked_by_the_peer_does_not_hide_its_death(make_pair: Callable[..., Pair]) -> None:
    pair = connected(make_pair, {"path": "tcp", "stall_timeout_s": 60.0}, MIB)
    post(pair, "read", MIB).wait(20)
    child = pair.remote.call("fork_child")
    try:
        pair.remote.kill()
        events: list[object] = []

        def lost() -> bool:
            events.extend(pair.agent.poll())
            return any(isinstance(event, PeerLostEvent) for event in events)

        until(lost, 10.0)
    finally:
        os.kill(child, signal.SIGKILL)
