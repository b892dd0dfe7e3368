"""Closing, forking, threads, and what is left behind."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from support.loopback import CAPABILITIES, Loopback, LoopbackConfig

from kvtransport import lifetime
from kvtransport.agent import Agent
from kvtransport.backend import Probe
from kvtransport.errors import (
    BackendUnavailableError,
    ClosedError,
    ForkError,
    KVTransportError,
    PeerLostError,
    RegionBusyError,
    TransferFailedError,
    UndrainedError,
    UnsupportedError,
)
from kvtransport.layout.blocks import Pair
from kvtransport.transfer import TransferState


def ranges(duo, n=100):
    return [Pair.ranges(duo.a.region, [0], duo.remote, [0], n)]


def test_close_gives_everything_up_and_is_idempotent(duo):
    agent, backend = duo.a.agent, duo.a.backend
    agent.close()
    agent.close()
    assert backend.closed
    assert backend.regions == {}
    assert backend.peers == {}
    assert not duo.a.region.registered


def test_use_after_close(duo):
    agent = duo.a.agent
    done = agent.read(duo.peer, ranges(duo))
    done.wait(1)
    blob = duo.b.agent.metadata()
    agent.close()
    for call in (
        lambda: agent.register(bytearray(8)),
        lambda: agent.deregister(duo.a.region),
        agent.metadata,
        lambda: agent.add_peer(blob),
        lambda: agent.remove_peer(duo.peer),
        lambda: agent.read(duo.peer, []),
        agent.poll,
        agent.progress,
        agent.notifications,
    ):
        with pytest.raises(ClosedError):
            call()
    done.wait(0)
    done.cancel()
    assert agent.stats().transfers == {("read", "done"): 1}


def test_close_cancels_and_waits(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))

    def answer():
        while not duo.a.backend.cancelled:
            time.sleep(0.001)
        duo.a.backend.finish_all()

    thread = threading.Thread(target=answer)
    thread.start()
    duo.a.agent.close(drain_s=10)
    thread.join()
    assert transfer.state is TransferState.DONE


def test_close_that_cannot_drain_keeps_the_memory(make_duo):
    duo = make_duo()
    duo.a.backend.held = True
    memory = weakref.ref(duo.a.memory)
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    kept = lifetime.kept_count()
    with pytest.raises(UndrainedError, match="100 bytes"):
        duo.a.agent.close(drain_s=0.01)
    assert duo.a.backend.closed
    assert transfer.state is TransferState.QUARANTINED
    assert isinstance(transfer.error, ClosedError)
    assert lifetime.kept_count() == kept + 1
    with pytest.raises(ClosedError):
        transfer.wait(1)
    duo.a.memory = duo.a.region = None
    del transfer
    gc.collect()
    assert memory() is not None
    duo.a.agent.close()


def test_quarantined_region_is_never_deregistered(make_duo):
    duo = make_duo(options={"drain_s": 0.01})
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo), deadline_s=0.01)
    while not transfer.done:
        transfer.poll()
    with pytest.raises(RegionBusyError, match="100 bytes of it are quarantined"):
        duo.a.agent.deregister(duo.a.region, drain_s=5)
    with pytest.raises(UndrainedError):
        duo.a.agent.remove_peer(duo.peer)
    assert f"drop {duo.peer.peer_id}" not in duo.a.backend.calls


def test_remove_peer_fails_its_transfers_first(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    duo.a.backend.held = False
    duo.a.agent.remove_peer(duo.peer, drain_s=1)
    assert transfer.state is TransferState.FAILED
    assert duo.a.backend.calls[-1] == f"drop {duo.peer.peer_id}"
    with pytest.raises(TransferFailedError, match="removed"):
        transfer.wait(1)


def test_never_closed_is_a_resource_warning():
    agent = Agent(Loopback(), name="forgotten")
    backend = agent._backend
    del agent
    with pytest.warns(ResourceWarning, match="forgotten"):
        gc.collect()
    assert backend.closed


def test_backend_that_cannot_run_here():
    class Absent(Loopback):
        @classmethod
        def probe(cls, config):
            return Probe(available=False, reason="no device", hint="pip install x")

    with pytest.raises(BackendUnavailableError, match=r"no device. pip install x"):
        Agent(Absent(), name="x")


def test_failed_open_leaves_no_agent_behind():
    class Broken(Loopback):
        def open(self, name, config):
            raise BackendUnavailableError("driver too old")

    with pytest.raises(BackendUnavailableError):
        Agent(Broken(), name="x")
    gc.collect()


def test_each_incarnation_opens_under_its_own_name():
    with Agent(Loopback(), name="same") as one, Agent(Loopback(), name="same") as two:
        names = [agent._backend.name for agent in (one, two)]
        assert len(set(names)) == 2
        assert all(name.startswith("same.") for name in names)


def test_fork_is_detected(duo):
    # A child must not take the lock either: another thread may hold it at fork.
    code = os.fork()
    if code == 0:
        status = 1
        try:
            duo.a.agent._lock = None
            for call in (duo.a.agent.poll, duo.a.agent.close, duo.a.agent.metadata):
                try:
                    call()
                except ForkError:
                    continue
                os._exit(2)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(code, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    duo.a.agent.read(duo.peer, ranges(duo)).wait(1)


def test_single_threaded_backends_are_guarded(make_duo):
    duo = make_duo(threading="single")
    errors = []

    def other():
        try:
            duo.a.agent.poll()
        except UnsupportedError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [error.capability for error in errors] == ["threading"]
    duo.a.agent.poll()


def test_threads_post_and_poll_together(make_duo):
    duo = make_duo(nbytes=1 << 16)
    lock, calls = threading.Lock(), []
    original = duo.a.backend.poll

    def poll():
        assert lock.acquire(blocking=False), "two threads are inside the backend"
        try:
            return original()
        finally:
            lock.release()

    duo.a.backend.poll = poll

    def work(k):
        try:
            for i in range(100):
                o = (k * 100 + i) * 16
                transfer = duo.a.agent.read(
                    duo.peer, [Pair.ranges(duo.a.region, [o], duo.remote, [o], 16)]
                )
                if i % 2:
                    transfer.wait(10)
                else:
                    while not transfer.done:
                        calls.extend(duo.a.agent.poll())
        except (KVTransportError, AssertionError) as error:
            calls.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls += duo.a.agent.poll()
    assert len({event.transfer.transfer_id for event in calls}) == len(calls) == 800
    assert np.array_equal(duo.a.memory[: 800 * 16], duo.b.memory[: 800 * 16])


def test_close_races_poll(make_duo):
    for _ in range(20):
        duo = make_duo()
        duo.a.backend.held = True
        duo.a.agent.read(duo.peer, ranges(duo))
        duo.a.backend.held = False
        ends = []

        def spin(agent=duo.a.agent, ends=ends):
            try:
                while True:
                    agent.poll()
            except ClosedError as error:
                ends.append(error)

        threads = [threading.Thread(target=spin) for _ in range(3)]
        for thread in threads:
            thread.start()
        duo.a.agent.close()
        for thread in threads:
            thread.join(10)
        assert len(ends) == 3


def test_backend_errors_in_poll_reach_the_caller(duo):
    def poll():
        raise PeerLostError("the library is gone")

    duo.a.backend.poll = poll
    with pytest.raises(KVTransportError):
        duo.a.agent.poll()
    del duo.a.backend.poll
    duo.a.agent.read(duo.peer, ranges(duo)).wait(1)


def test_happy_path_is_silent(make_duo, caplog):
    caplog.set_level(logging.INFO)
    duo = make_duo()
    duo.a.agent.read(duo.peer, ranges(duo), notify=b"x").wait(1)
    duo.b.agent.notifications()
    duo.a.agent.close()
    duo.b.agent.close()
    assert caplog.records == []


def test_unread_events_are_bounded(make_duo):
    duo = make_duo(options={"max_events": 10, "max_notifications": 5})
    for _ in range(30):
        duo.a.agent.read(duo.peer, ranges(duo), notify=b"x").wait(1)
    assert len(duo.a.agent.poll()) == 10
    assert duo.a.agent.stats().events_dropped == 20
    assert len(duo.b.agent.notifications()) == 5
    assert duo.b.agent.stats().notifications_dropped == 25


def test_ten_thousand_transfers_leave_nothing(duo):
    agent = duo.a.agent
    for _ in range(10_000):
        agent.read(duo.peer, ranges(duo)).wait(1)
        agent.poll()
    duo.a.backend.posts.clear()
    assert duo.a.region.users == 0
    assert duo.peer.in_flight == 0
    inflight = agent._inflight
    assert not inflight._by_ticket
    assert not inflight._transfers
    assert not inflight.waiting


def test_importing_the_core_imports_no_driver():
    code = (
        "import sys, kvtransport, kvtransport.agent, kvtransport.registry, kvtransport.cli;"
        "bad = {'torch', 'vllm', 'nixl', 'nixl_cu12', 'rich', 'typer', 'zmq'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_config_without_capability_object():
    config = LoopbackConfig(replace(CAPABILITIES, max_regions=1))
    with Agent(Loopback(), name="x", config=config) as agent:
        assert agent.capabilities.max_regions == 1
