"""Owner and reader in processes of their own: kills, restarts, secrets."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import zmq
from support.lease_peer import PeerProcess, chain, retain

from kvtransport.lease import protocol
from kvtransport.lease.control import ControlPlane
from kvtransport.lease.held import HeldLease
from kvtransport.lease.security import ClusterSecret

Engine = Callable[..., ControlPlane]
Process = Callable[..., PeerProcess]
Eventually = Callable[..., None]

SECRET = "a secret of the cluster"


def leased(control: ControlPlane, tokens: int = 64) -> HeldLease:
    result = control.lookup(chain(tokens), deadline_s=20.0).wait(20.0)
    assert result is not None
    assert result.lease is not None, result.reason
    return result.lease


@pytest.mark.parametrize("secret", ["", SECRET])
def test_lease_between_processes(
    engine: Engine, peer_process: Process, eventually: Eventually, secret: str
) -> None:
    owner = peer_process(engine_id="owner", hold=64, secret=secret)
    reader = engine("reader", peers={"o": owner.address}, secret=secret)
    lease = leased(reader)
    assert lease.tokens == 64
    assert owner.status()["ledger"]["leases"] == 1
    assert owner.status()["encrypted"] == bool(secret)
    lease.release(delivered=True)
    eventually(lambda: owner.status()["ledger"]["leases"] == 0)


def test_owner_killed_then_restarted_at_the_same_address(
    engine: Engine, peer_process: Process, eventually: Eventually
) -> None:
    owner = peer_process(engine_id="owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, lease_s=30.0)
    lease = leased(reader)
    owner.kill()
    eventually(lambda: reader.peers()[0].state == "down")
    assert reader.engines() == []
    began = time.monotonic()
    result = reader.lookup(chain(64), deadline_s=20.0).wait(20.0)
    assert result is not None
    assert (result.lease, result.reason) == (None, "no_peer")
    assert time.monotonic() - began < 10.0, "a dead peer must not cost the whole deadline"
    assert not lease.lost, "the owner may be alive behind a broken link"

    again = peer_process(engine_id="owner", hold=64, listen=owner.address)
    eventually(reader.engines)
    fresh = leased(reader)
    assert fresh.peer.incarnation != lease.peer.incarnation
    assert lease.lost
    assert not lease.valid()
    # What the old incarnation granted means nothing to the new one.
    lease.release(delivered=True)
    assert again.status()["ledger"]["leases"] == 1
    assert reader.status()["control"]["peer.new_incarnation"] == 1


def test_lease_of_a_dead_owner_ends_at_its_deadline(
    engine: Engine, peer_process: Process, eventually: Eventually
) -> None:
    owner = peer_process(engine_id="owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, lease_s=1.5)
    lease = leased(reader)
    owner.kill()
    eventually(lambda: lease.lost)
    assert time.monotonic() >= lease.deadline
    assert not lease.valid()
    assert reader.status()["client"]["counters"]["lease.lost_deadline"] == 1


def test_requests_to_the_old_incarnation_are_refused(engine: Engine) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    lease = leased(reader)
    server = owner._server
    for message in (
        protocol.Renew(7, "another", lease.lease_id, 10.0),
        protocol.Lookup(7, "another", "r", chain(64).digests, 64, 16, 0, 1.0),
    ):
        reply = server.handle(b"client", [protocol.encode(message)])
        assert reply is not None
        answer = protocol.decode_to_reader(reply)
        assert isinstance(answer, protocol.Error)
        assert answer.code == "stale_incarnation"
    for quiet in (
        protocol.Release("another", lease.lease_id, delivered=True),
        protocol.Discard("another", "request"),
    ):
        assert server.handle(b"client", [protocol.encode(quiet)]) is None
    assert owner.ledger.snapshot()["leases"] == 1
    assert owner.status()["server"]["refused.incarnation"] == 4


def test_owner_restarted_while_being_asked(
    engine: Engine, peer_process: Process, eventually: Eventually
) -> None:
    """Whatever a lookup meets on the way, it ends, and the next one finds the new owner."""
    owner = peer_process(engine_id="owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    leased(reader).release(delivered=False)
    for _ in range(3):
        lookups = [reader.lookup(chain(64), deadline_s=5.0) for _ in range(20)]
        address = owner.address
        owner.kill()
        owner = peer_process(engine_id="owner", hold=64, listen=address)
        for lookup in lookups:
            assert lookup.wait(10.0) is not None
        eventually(reader.engines)
        leased(reader).release(delivered=False)
    del owner


def test_reader_killed_costs_the_rest_of_its_lease(
    engine: Engine, peer_process: Process, eventually: Eventually
) -> None:
    owner = engine("owner", hold=64)
    script = peer_process(engine_id="reader", peers={"o": owner.address})
    eventually(lambda: script.status()["peers"][0]["state"] == "connected")
    # Any reader's lease will do; nobody renews or releases this one.
    grant = owner.ledger.lookup(chain(64).digests, 64, duration_s=4.0, reader="reader")
    assert grant is not None
    script.kill()
    assert owner.ledger.snapshot()["leases"] == 1
    eventually(lambda: owner.ledger.snapshot()["leases"] == 0)
    assert owner.ledger.snapshot()["holdings"] == 1


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, "another secret, of others"), ("", SECRET)])
def test_wrong_secret_learns_nothing(
    engine: Engine, peer_process: Process, eventually: Eventually, mine: str, theirs: str
) -> None:
    owner = peer_process(engine_id="owner", hold=64, secret=theirs)
    stranger = engine("stranger", peers={"o": owner.address}, secret=mine)
    friend = engine("friend", peers={"o": owner.address}, secret=theirs)
    assert leased(friend).tokens == 64
    result = stranger.lookup(chain(64), deadline_s=1.0).wait(5.0)
    assert result is not None
    assert result.lease is None
    (peer,) = stranger.peers()
    assert (peer.state, peer.engine_id) != ("connected", "owner")
    assert peer.engine_id == ""
    status = owner.status()
    assert status["ledger"]["leases"] == 1
    assert status["control"]["connection.refused"] >= 1


def test_the_owners_public_key_is_not_enough(engine: Engine) -> None:
    """A client whose own key does not come from the secret is turned away."""
    owner = engine("owner", hold=64, secret=SECRET)
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.curve_serverkey = ClusterSecret(SECRET.encode()).curve_keys().server_public
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
        sock.connect(owner.address)
        sock.send(protocol.encode(protocol.StatusRequest(1)))
        assert not sock.poll(1000)
    assert owner.status()["server"] == {}


def test_open_owner_is_not_trusted_by_a_reader_with_a_secret(
    engine: Engine, peer_process: Process
) -> None:
    owner = peer_process(engine_id="owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, secret=SECRET)
    result = reader.lookup(chain(64), deadline_s=1.0).wait(5.0)
    assert result is not None
    assert result.lease is None
    assert reader.engines() == []


def test_a_pair_fails_alone(engine: Engine, peer_process: Process, eventually: Eventually) -> None:
    dying, living = (peer_process(engine_id=name, hold=64) for name in ("dying", "living"))
    reader = engine("reader", peers={"a": dying.address, "b": living.address})
    eventually(lambda: len(reader.engines()) == 2)
    dying.kill()
    for _ in range(20):
        lease = leased(reader)
        lease.release(delivered=False)
    eventually(lambda: [peer.engine_id for peer in reader.engines()] == ["living"])


def test_engine_moved_to_another_address(
    engine: Engine, peer_process: Process, eventually: Eventually
) -> None:
    old = peer_process(engine_id="owner", hold=64)
    elsewhere = engine("placeholder")
    address = elsewhere.address
    elsewhere.close(5.0)
    reader = engine("reader", peers={"a": old.address, "b": address}, lease_s=30.0)
    lease = leased(reader)
    old.kill()
    peer_process(engine_id="owner", hold=64, listen=address)
    eventually(lambda: [peer.address for peer in reader.engines()] == [address])
    eventually(lambda: lease.lost)
    assert leased(reader).peer.address == address


def test_retained_holding_of_a_second_engine(engine: Engine, peer_process: Process) -> None:
    """Both directions through the same code: each side owns and reads."""
    other = peer_process(engine_id="other", hold=64)
    mine = engine("mine", peers={"o": other.address})
    retain(mine, 128)
    assert leased(mine).peer.engine_id == "other"
    third = engine("third", peers={"m": mine.address, "o": other.address})
    assert leased(third, 128).peer.engine_id in ("mine", "other")
