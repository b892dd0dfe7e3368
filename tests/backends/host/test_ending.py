"""Cancel, close and exit: bounded, quiet, and nothing left behind."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.host_pair import Pair, Remote, blocks, pattern

from kvtransport.agent import Agent
from kvtransport.backend import Completion, Op
from kvtransport.errors import BackpressureError, ClosedError, ForkError, TransferFailedError
from kvtransport.layout.blocks import Pair as Descriptors
from kvtransport.transfer import Transfer, TransferState
from kvtransport_backends.host.backend import HostBackend
from kvtransport_backends.host.config import HostConfig

MIB = 1 << 20
BIG = 128 * MIB


def post(pair: Pair, op: str, nbytes: int) -> Transfer:
    ranges = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("kv"), [0], [nbytes])
    transfer: Transfer = getattr(pair.agent, op)(pair.peer, [ranges])
    return transfer


def connected(make_pair: Callable[..., Pair], nbytes: int, **config: object) -> Pair:
    pair = make_pair(config)
    pair.remote.call("register", name="kv", nbytes=nbytes)
    pair.remote.call("set", name="kv", value=5)
    pair.here = pair.memory("mine", nbytes, fill=3)
    pair.connect()
    return pair


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@pytest.mark.parametrize("op", ["read", "write"])
def test_cancelled_transfers_end_quiet(make_pair: Callable[..., Pair], path: str, op: str) -> None:
    pair = connected(make_pair, BIG, path=path, chunk_bytes=65536)
    pair.remote.call("register", name="other", nbytes=MIB, seed=4)
    pair.connect()
    second = pair.memory("second", MIB)
    ranges = Descriptors.ranges(pair.local["second"], [0], pair.peer.region("other"), [0], [MIB])
    transfers = [post(pair, op, BIG) for _ in range(4)]
    behind = pair.agent.read(pair.peer, [ranges])
    if op == "read":
        until(lambda: pair.here[0] == 5)  # its first bytes have landed
    for transfer in transfers:
        transfer.cancel()
    for transfer in transfers:
        until(lambda transfer=transfer: transfer.poll().terminal)
    assert transfers[-1].state is TransferState.CANCELLED
    # Quiet: neither side changes any more.
    here, there = pair.here.copy(), pair.remote.call("digest", name="kv")
    time.sleep(0.3)
    assert (pair.here == here).all()
    assert pair.remote.call("digest", name="kv") == there
    # And what comes next gets its own bytes, not the rest of what was cancelled.
    behind.wait(20)
    assert (second == pattern(4, MIB)).all()


def test_cancel_does_not_wait_for_a_frozen_peer(make_pair: Callable[..., Pair]) -> None:
    """Long before the peer counts as stalled, and with most of the data still to come."""
    pair = connected(make_pair, BIG, path="tcp", stall_timeout_s=3000.0)
    transfer = post(pair, "read", BIG)
    until(lambda: pair.here[0] == 5)
    pair.remote.freeze()
    transfer.cancel()
    until(lambda: transfer.poll().terminal)
    assert transfer.state is TransferState.CANCELLED


def test_cancelling_a_queued_transfer_spares_its_siblings(
    make_pair: Callable[..., Pair], path: str
) -> None:
    pair = connected(make_pair, 64 * MIB, path=path)
    transfers = [post(pair, "read", 64 * MIB) for _ in range(6)]
    transfers[3].cancel()
    for index, transfer in enumerate(transfers):
        until(lambda transfer=transfer: transfer.poll().terminal)
        assert index == 3 or transfer.state is TransferState.DONE


def test_cancel_of_finished_or_unknown_tickets_is_ignored(
    make_pair: Callable[..., Pair], path: str
) -> None:
    pair = connected(make_pair, MIB, path=path)
    transfer = post(pair, "read", MIB)
    transfer.wait(20)
    transfer.cancel()
    pair.backend.cancel(1)
    pair.backend.cancel(12345)
    assert not [event for event in pair.backend.poll() if isinstance(event, Completion)]


def test_full_queue_is_backpressure(make_pair: Callable[..., Pair], path: str) -> None:
    pair = connected(make_pair, 64 * MIB, path=path, max_in_flight=3)
    transfers = [post(pair, "read", 64 * MIB) for _ in range(3)]
    with pytest.raises(BackpressureError) as caught:
        post(pair, "read", 64 * MIB)
    assert caught.value.retryable
    for transfer in transfers:
        transfer.wait(20)
    post(pair, "read", 64 * MIB).wait(20)
    # The core counts too; this is the backend's own bound.
    mine, kv = pair.local["mine"].region_id, pair.peer.region("kv").region_id
    one = blocks(mine, [0], kv, [0], [64 * MIB])
    for ticket in range(1000, 1003):
        pair.backend.post(ticket, Op.READ, pair.peer.peer_id, one, None)
    with pytest.raises(BackpressureError):
        pair.backend.post(1003, Op.READ, pair.peer.peer_id, one, None)
    ended: set[int] = set()

    def all_ended() -> bool:
        ended.update(event.ticket for event in pair.backend.poll() if isinstance(event, Completion))
        return ended == {1000, 1001, 1002}

    until(all_ended)


@pytest.mark.parametrize("op", ["read", "write"])
def test_close_in_flight(make_pair: Callable[..., Pair], path: str, op: str) -> None:
    pair = connected(make_pair, BIG, path=path)
    transfers = [post(pair, op, BIG) for _ in range(4)]
    pair.agent.close(drain_s=10)
    assert all(transfer.done for transfer in transfers)
    assert TransferState.QUARANTINED not in {transfer.state for transfer in transfers}
    before = pair.remote.call("digest", name="kv", stop=32 * MIB)
    time.sleep(0.2)
    assert pair.remote.call("digest", name="kv", stop=32 * MIB) == before


@pytest.mark.parametrize("op", ["read", "write"])
def test_local_memory_that_is_not_mapped(
    make_pair: Callable[..., Pair], path: str, op: str
) -> None:
    """An error of ours, met by a system call: typed, quiet, and the next one works."""
    pair = connected(make_pair, MIB, path=path)
    hole = mmap.mmap(-1, MIB)
    address = np.frombuffer(hole, np.uint8).ctypes.data
    hole.close()
    good = pair.local["mine"]
    pair.local["mine"] = pair.agent.register((address, MIB, None), name="hole")
    transfer = post(pair, op, MIB)
    with pytest.raises(TransferFailedError):
        transfer.wait(20)
    assert transfer.state is TransferState.FAILED
    pair.local["mine"] = good
    post(pair, op, MIB).wait(20)


def test_target_closes_in_flight(make_pair: Callable[..., Pair], path: str) -> None:
    for op in ("read", "write"):
        pair = connected(make_pair, BIG, path=path)
        transfer = post(pair, op, BIG)
        pair.remote.call("close")
        until(lambda transfer=transfer: transfer.poll().terminal)


def test_close_while_a_frozen_peer_is_served(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent]
) -> None:
    """The thread that waits for the peer to take its bytes ends with the agent."""
    agent = make_agent({"path": "tcp", "stall_timeout_s": 3000.0})
    agent.register(np.full(BIG, 5, np.uint8), name="kv")
    remote = make_remote({"path": "tcp"})
    remote.call("register", name="mine", nbytes=BIG)
    remote.call("add_peer", blob=agent.metadata().hex())
    remote.call("post", op="read", peer="here", local="mine", remote="kv", nbytes=BIG)
    remote.freeze()
    serving = [thread for thread in threading.enumerate() if thread.name == "kvt-host-serve"]
    assert serving
    agent.close()
    assert not any(thread.is_alive() for thread in serving)


def test_close_races_poll(make_pair: Callable[..., Pair], path: str) -> None:
    pair = connected(make_pair, 64 * MIB, path=path)
    post(pair, "read", 64 * MIB)
    stop = threading.Event()
    problems: list[Exception] = []

    def poll() -> None:
        while not stop.is_set():
            try:
                pair.agent.poll()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, the test reports it
                problems.append(error)

    threads = [threading.Thread(target=poll) for _ in range(4)]
    for thread in threads:
        thread.start()
    pair.agent.close()
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not problems
    assert not any(thread.is_alive() for thread in threads)


def test_close_is_idempotent_and_ends_use() -> None:
    backend = HostBackend()
    backend.close()
    backend = HostBackend()
    backend.open("one", HostConfig())
    backend.close()
    backend.close()
    assert backend.poll() == []
    for call in (
        backend.export,
        lambda: backend.deregister(1),
        lambda: backend.import_peer(1, b""),
    ):
        with pytest.raises(ClosedError):
            call()


def resources() -> tuple[int, int]:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_a_hundred_agents_leave_nothing_here(make_remote: Callable[..., Remote], path: str) -> None:
    remote = make_remote({"path": path})
    remote.call("register", name="kv", nbytes=MIB, seed=1)
    blob = bytes.fromhex(remote.call("export"))

    def cycle() -> None:
        with Agent.open("host", name="here", config={"path": path}) as agent:
            region = agent.register(np.zeros(MIB, np.uint8), name="mine")
            peer = agent.add_peer(blob)
            ranges = Descriptors.ranges(region, [0], peer.region("kv"), [0], [MIB])
            agent.read(peer, [ranges]).wait(20)
            agent.write(peer, [ranges]).wait(20)

    cycle()
    before = resources()
    served = remote.call("resources")
    for _ in range(100):
        cycle()
    assert resources() == before
    until(lambda: remote.call("resources") == served)


def test_dropped_peers_leave_nothing(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent], path: str
) -> None:
    agent = make_agent({"path": path})
    remote = make_remote({"path": path})
    blob = bytes.fromhex(remote.call("export"))
    before = resources()
    for _ in range(20):
        agent.remove_peer(agent.add_peer(blob))
    until(lambda: resources() == before)


SCRIPT = """
    import atexit, sys, threading
    import numpy as np
    from kvtransport.agent import Agent
    from kvtransport.layout.blocks import Pair

    # Runs last: no thread may copy into memory that the interpreter takes down.
    atexit.register(lambda: print("threads", threading.active_count()))
    blob, path = bytes.fromhex(sys.argv[1]), sys.argv[2]
    agent = Agent.open("host", name="script", config={"path": path})
    region = agent.register(np.zeros(1 << 26, np.uint8), name="mine")
    peer = agent.add_peer(blob)
    def ranges(n):
        return [Pair.ranges(region, [0], peer.region("kv"), [0], [n])]
    agent.read(peer, ranges(4096)).wait(20)
    agent.write(peer, ranges(4096)).wait(20)
    if sys.argv[3] == "busy":
        keep = [agent.read(peer, ranges(1 << 26)) for _ in range(4)]
        keep += [agent.write(peer, ranges(1 << 26)) for _ in range(4)]
    print("end")
"""


@pytest.mark.parametrize("busy", ["idle", "busy"])
def test_exit_without_close(make_remote: Callable[..., Remote], path: str, busy: str) -> None:
    """Ends by itself, at once, with code 0 and nothing on standard error."""
    remote = make_remote({"path": path})
    remote.call("register", name="kv", nbytes=1 << 26)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), remote.call("export"), path, busy],
        capture_output=True,
        timeout=30,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "end\nthreads 1\n"), done.stderr
    assert done.stderr == ""


def test_fork_is_refused_and_harmless(make_pair: Callable[..., Pair], path: str) -> None:
    """The child can do nothing, and its exit does not disturb the parent."""
    pair = connected(make_pair, MIB, path=path)
    post(pair, "write", MIB).wait(20)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pair.agent.poll()
        except ForkError:
            pair.backend.close()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    post(pair, "write", MIB).wait(20)
    post(pair, "read", MIB).wait(20)


def test_happy_path_logs_nothing(
    make_pair: Callable[..., Pair], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = connected(make_pair, MIB, path=path)
    for op in ("read", "write"):
        post(pair, op, MIB).wait(20)
    pair.agent.remove_peer(pair.peer)
    pair.agent.close()
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
