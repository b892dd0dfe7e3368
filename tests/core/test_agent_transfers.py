"""Transfers through an agent: bytes, states, events."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvtransport.backend import Completion, PeerDown
from kvtransport.errors import (
    BackpressureError,
    PeerLostError,
    TransferCancelledError,
    TransferFailedError,
    TransferTimeoutError,
    UnsupportedError,
)
from kvtransport.events import PeerLostEvent, TransferEvent
from kvtransport.layout.blocks import BlockTable, Pair
from kvtransport.transfer import TransferState

State = TransferState


def ranges(duo, local=(0,), remote=(0,), nbytes=4096):
    return [Pair.ranges(duo.a.region, list(local), duo.remote, list(remote), nbytes)]


def test_read_moves_exactly_the_named_bytes(duo):
    transfer = duo.a.agent.read(duo.peer, ranges(duo, (100,), (5000,), 1000))
    transfer.wait(1)
    assert transfer.state is State.DONE
    assert transfer.nbytes == 1000
    assert np.array_equal(duo.a.memory[100:1100], duo.b.memory[5000:6000])
    assert not duo.a.memory[:100].any()
    assert not duo.a.memory[1100:].any()


def test_write_moves_the_other_way(duo):
    duo.a.memory[:] = 7
    before = duo.b.memory.copy()
    duo.a.agent.write(duo.peer, ranges(duo, (0,), (10,), 5)).wait(1)
    before[10:15] = 7
    assert np.array_equal(duo.b.memory, before)


def test_blocks_in_any_order(duo):
    rng = np.random.default_rng(3)
    mine = BlockTable(duo.a.region, 0, 512, 512, 128)
    theirs = BlockTable(duo.remote, 0, 512, 512, 128)
    local, remote = rng.permutation(128)[:60], rng.permutation(128)[:60]
    duo.a.agent.read(duo.peer, [Pair.blocks(mine, theirs, local, remote)]).wait(1)
    blocks_a, blocks_b = duo.a.memory.reshape(128, 512), duo.b.memory.reshape(128, 512)
    assert np.array_equal(blocks_a[local], blocks_b[remote])
    untouched = np.setdiff1d(np.arange(128), local)
    assert not blocks_a[untouched].any()


def test_every_transfer_gives_one_event(duo):
    transfers = [duo.a.agent.read(duo.peer, ranges(duo, (i * 10,), (0,), 10)) for i in range(5)]
    for transfer in transfers:
        transfer.wait(1)
    events = duo.a.agent.poll() + duo.a.agent.poll()
    assert [e.transfer for e in events if isinstance(e, TransferEvent)] == transfers
    assert len(events) == 5


def test_waiting_for_one_keeps_the_others_events(duo):
    duo.a.backend.held = True
    first = duo.a.agent.read(duo.peer, ranges(duo, (0,), (0,), 10))
    second = duo.a.agent.read(duo.peer, ranges(duo, (20,), (0,), 10))
    duo.a.backend.finish_all()
    second.wait(1)
    assert first.state is State.DONE
    assert {e.transfer for e in duo.a.agent.poll()} == {first, second}


def test_empty_transfer_is_done_at_once(duo):
    transfer = duo.a.agent.read(duo.peer, [])
    assert transfer.state is State.DONE
    assert (transfer.nbytes, transfer.descriptors) == (0, 0)
    assert duo.a.backend.posts == []


def test_empty_transfer_still_notifies(duo):
    duo.a.agent.read(duo.peer, [], notify=b"x").wait(1)
    (event,) = duo.b.agent.notifications()
    assert (event.peer.name, event.payload) == ("a", b"x")


def test_notification_alone(duo):
    duo.a.agent.notify(duo.peer, b"\x00\xff").wait(1)
    assert [e.payload for e in duo.b.agent.notifications()] == [b"\x00\xff"]


def test_oversize_notification_is_refused(duo):
    with pytest.raises(UnsupportedError, match=r"1025 bytes.*1024"):
        duo.a.agent.write(duo.peer, ranges(duo), notify=bytes(1025))
    assert duo.a.backend.posts == []


def test_wait_timeout_leaves_it_draining_and_pinned(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.01)
    assert transfer.state is State.DRAINING
    assert duo.a.region.busy
    assert duo.a.backend.cancelled, "a timeout asks the backend to cancel"
    duo.a.backend.events.append(Completion(*duo.a.backend.cancelled, cancelled=True))
    with pytest.raises(TransferTimeoutError):
        transfer.wait(1)
    assert transfer.state is State.FAILED
    assert not duo.a.region.busy


def test_late_success_is_success(make_duo):
    duo = make_duo(cancel="none")
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo), deadline_s=0.01)
    while transfer.poll() is not State.DRAINING:
        time.sleep(0.001)
    assert isinstance(transfer.error, TransferTimeoutError)
    duo.a.backend.finish_all()
    transfer.wait(1)
    assert transfer.state is State.DONE
    assert transfer.error is None


def test_never_quiet_is_quarantined(make_duo):
    duo = make_duo(options={"drain_s": 0.02})
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo, nbytes=4000), deadline_s=0.01)
    with pytest.raises(TransferTimeoutError):
        transfer.wait()
    assert transfer.state is State.QUARANTINED
    assert duo.a.agent.quarantined_bytes == 4000
    # A late completion proves nothing retroactively, and breaks nothing.
    duo.a.backend.finish_all()
    assert [e.transfer for e in duo.a.agent.poll()] == [transfer]
    stats = duo.a.agent.stats()
    assert stats.late_completions == 1
    assert stats.contract_errors == 0
    assert duo.a.agent.quarantined_bytes == 4000


def test_cancel(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    transfer.cancel()
    transfer.cancel()
    assert transfer.state is State.DRAINING
    duo.a.backend.events.append(Completion(*duo.a.backend.cancelled, cancelled=True))
    with pytest.raises(TransferCancelledError):
        transfer.wait(1)
    assert transfer.state is State.CANCELLED
    transfer.cancel()


def test_cancel_that_came_too_late_is_done(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    transfer.cancel()
    duo.a.backend.finish_all()
    transfer.wait(1)
    assert transfer.state is State.DONE


def test_unsupported_cancel_leaves_the_transfer_alone(make_duo):
    duo = make_duo(cancel="none")
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    with pytest.raises(UnsupportedError):
        transfer.cancel()
    assert transfer.state is State.IN_FLIGHT
    duo.a.backend.finish_all()
    transfer.wait(1)


def test_failure_waits_for_siblings(make_duo):
    duo = make_duo(max_descriptors=1)
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo, (0, 100, 200), (0, 200, 400), 10))
    one, two, three = duo.a.backend.open_posts
    duo.a.backend.finish(two, TransferFailedError("broken"))
    assert transfer.poll() is State.DRAINING
    assert duo.a.backend.cancelled == [one, three]
    duo.a.backend.events.append(Completion(one, cancelled=True))
    assert transfer.poll() is State.DRAINING
    assert duo.a.region.busy
    duo.a.backend.events.append(Completion(three, cancelled=True))
    assert transfer.poll() is State.FAILED
    with pytest.raises(TransferFailedError, match="broken") as raised:
        transfer.wait(1)
    assert raised.value.peer == "b"
    assert raised.value.transfer_id == transfer.transfer_id


def test_the_first_failure_is_the_cause(make_duo):
    duo = make_duo(max_descriptors=1)
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo, (0, 100), (0, 200), 10))
    one, two = duo.a.backend.open_posts
    duo.a.backend.finish(two, TransferFailedError("first"))
    duo.a.backend.finish(one, TransferFailedError("second"))
    with pytest.raises(TransferFailedError, match="first"):
        transfer.wait(1)


@pytest.mark.parametrize("error", [BackpressureError("full"), PeerLostError("gone")])
def test_a_refused_post_leaves_nothing(duo, error):
    def post(*_):
        raise error

    duo.a.backend.post = post
    with pytest.raises(type(error)):
        duo.a.agent.read(duo.peer, ranges(duo))
    assert not duo.a.region.busy
    assert duo.a.agent.stats().in_flight == 0
    assert duo.a.agent.poll() == []
    del duo.a.backend.post
    duo.a.agent.read(duo.peer, ranges(duo)).wait(1)


def test_completions_nobody_waits_for_are_counted_not_delivered(duo):
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    transfer.wait(1)
    duo.a.backend.events += [Completion(1), Completion(999)]
    assert len(duo.a.agent.poll()) == 1
    assert duo.a.agent.poll() == []
    assert duo.a.agent.stats().contract_errors == 2


def test_max_in_flight_is_backpressure(make_duo):
    duo = make_duo(max_in_flight=2)
    duo.a.backend.held = True
    for i in range(2):
        duo.a.agent.read(duo.peer, ranges(duo, (i * 100,), (0,), 10))
    with pytest.raises(BackpressureError) as raised:
        duo.a.agent.read(duo.peer, ranges(duo, (500,), (0,), 10))
    assert raised.value.retryable
    assert len(duo.a.backend.open_posts) == 2
    assert duo.a.region.users == 2
    duo.a.backend.finish_all()
    duo.a.agent.poll()
    duo.a.backend.held = False
    duo.a.agent.read(duo.peer, ranges(duo, (500,), (0,), 10)).wait(1)


def test_parts_wait_for_room(make_duo):
    duo = make_duo(max_in_flight=2, max_descriptors=1)
    offsets = [i * 100 for i in range(10)]
    transfer = duo.a.agent.read(duo.peer, ranges(duo, offsets, offsets[::-1], 10))
    assert transfer.descriptors == 10
    transfer.wait(1)
    for i, o in enumerate(offsets):
        assert np.array_equal(duo.a.memory[o : o + 10], duo.b.memory[offsets[9 - i] :][:10])
    assert len(duo.a.backend.posts) == 10


def test_backend_backpressure_on_a_later_part_is_retried(make_duo):
    duo = make_duo(max_descriptors=1)
    duo.a.backend.held = True
    duo.a.agent.read(duo.peer, ranges(duo, (9000,), (0,), 1))
    original = duo.a.backend.post
    calls = []

    def post(*args):
        calls.append(args)
        if len(calls) in (2, 3):
            raise BackpressureError("queue is full")
        original(*args)

    duo.a.backend.post = post
    duo.a.backend.held = False
    transfer = duo.a.agent.read(duo.peer, ranges(duo, (0, 100), (0, 200), 10))
    transfer.wait(1)
    assert len(calls) == 4


def test_notification_follows_all_parts(make_duo):
    duo = make_duo(max_descriptors=1)
    duo.a.backend.held = True
    transfer = duo.a.agent.write(duo.peer, ranges(duo, (0, 100), (0, 200), 10), notify=b"n")
    assert len(duo.a.backend.open_posts) == 1, "the last part waits for the others"
    duo.a.backend.finish_all()
    assert not duo.b.agent.notifications()
    transfer.poll()
    duo.a.backend.finish_all()
    transfer.wait(1)
    assert [e.payload for e in duo.b.agent.notifications()] == [b"n"]


def test_a_foreign_exception_in_post_pins_the_memory(make_duo):
    duo = make_duo(options={"drain_s": 0.02})

    def post(*_):
        raise ZeroDivisionError("driver bug")

    duo.a.backend.post = post
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    assert transfer.state is State.DRAINING
    assert duo.a.region.busy
    while not transfer.done:
        duo.a.agent.poll()
    assert transfer.state is State.QUARANTINED
    assert duo.a.agent.stats().contract_errors == 1


def test_peer_down_ends_its_transfers_and_refuses_new_ones(duo):
    duo.a.backend.held = True
    transfer = duo.a.agent.read(duo.peer, ranges(duo))
    ticket = next(iter(duo.a.backend.open_posts))
    duo.a.backend.events.append(PeerDown(duo.peer.peer_id, PeerLostError("reset")))
    (event,) = duo.a.agent.poll()
    assert isinstance(event, PeerLostEvent)
    assert transfer.state is State.DRAINING
    with pytest.raises(PeerLostError):
        duo.a.agent.read(duo.peer, ranges(duo))
    assert f"drop {duo.peer.peer_id}" not in duo.a.backend.calls, "still in use"
    duo.a.backend.events.append(Completion(ticket, PeerLostError("reset")))
    with pytest.raises(PeerLostError):
        transfer.wait(1)
    assert f"drop {duo.peer.peer_id}" in duo.a.backend.calls
    # Metadata of the same incarnation brings the pair back after a cut link.
    again = duo.a.agent.add_peer(duo.b.agent.metadata())
    assert again is not duo.peer
    duo.a.backend.held = False
    duo.a.agent.read(again, [Pair.ranges(duo.a.region, [0], again.region("kv"), [0], 10)]).wait(1)


def test_prepared_plan_is_posted_many_times(duo):
    from kvtransport.backend import Op

    plan = duo.a.agent.prepare(Op.READ, duo.peer, ranges(duo))
    for _ in range(3):
        duo.a.agent.post(plan).wait(1)
    assert duo.a.agent.stats().bytes_moved == {"read": 3 * 4096}
