from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from support.lease_peer import BLOCK, chain, retain

from kvtransport.errors import ClosedError, ConfigError
from kvtransport.lease import client
from kvtransport.lease.control import ControlPlane
from kvtransport.lease.digest import DigestChain
from kvtransport.lease.held import HeldLease, LookupResult
from kvtransport.lease.holding import Purpose

Engine = Callable[..., ControlPlane]
Eventually = Callable[..., None]


def ask(control: ControlPlane, query: DigestChain, **arguments: object) -> LookupResult:
    result = control.lookup(query, **{"deadline_s": 10.0, **arguments}).wait(10.0)
    assert result is not None
    return result


def leased(control: ControlPlane, query: DigestChain, **arguments: object) -> HeldLease:
    result = ask(control, query, **arguments)
    assert result.lease is not None, result.reason
    return result.lease


def state(control: ControlPlane) -> tuple[str, str]:
    (peer,) = control.peers()
    return peer.state, peer.reason


def connected(control: ControlPlane) -> bool:
    return all(peer.state == "connected" for peer in control.peers())


def leases(control: ControlPlane) -> int:
    return int(control.ledger.snapshot()["leases"])


def test_longest_prefix_with_its_tail(engine: Engine) -> None:
    owner = engine("owner", hold=100)
    reader = engine("reader", peers={"o": owner.address})
    lease = leased(reader, chain(200))
    assert lease.tokens == 100
    assert lease.block_ids[0].tolist() == [0, 1, 2, 3]
    assert lease.peer.engine_id == "owner"
    assert lease.peer.incarnation == owner.identity.incarnation
    assert dict(lease.peer.agents) == {0: b"agent of owner"}
    assert lease.purpose == "retained"
    assert not lease.diverged
    assert lease.valid()


def test_tail_counts_only_when_the_reader_has_the_same_tokens(engine: Engine) -> None:
    owner = engine("owner", hold=100)
    reader = engine("reader", peers={"o": owner.address})
    edited = DigestChain.of([*range(98), 7, 99, 100, 101], chain(1).seed)
    result = ask(reader, edited)
    assert result.lease is not None
    assert result.lease.tokens == 96
    assert result.tail_mismatch
    assert result.lease.diverged


def test_edited_history_gives_only_the_common_part(engine: Engine) -> None:
    owner = engine("owner", hold=320)
    reader = engine("reader", peers={"o": owner.address})
    seed = chain(1).seed
    edits = {
        "cut": [*range(100), *range(190, 320)],
        "changed": [*range(37), 9, *range(38, 320)],
        "inserted": [9, *range(320)],
        "other": [*range(1000, 1320)],
    }
    found = {}
    for name, tokens in edits.items():
        result = ask(reader, DigestChain.of(tokens, seed))
        found[name] = result.lease.tokens if result.lease else 0
        assert result.lease is None or result.lease.diverged
    assert found == {"cut": 96, "changed": 32, "inserted": 0, "other": 0}
    extension = leased(reader, DigestChain.of(range(400), seed))
    assert extension.tokens == 320
    assert not extension.diverged


def test_block_ids_cover_only_what_was_granted(engine: Engine) -> None:
    owner = engine("owner", hold=320)
    reader = engine("reader", peers={"o": owner.address})
    lease = leased(reader, chain(50))
    assert lease.tokens == 48
    assert len(lease.block_ids[0]) == -(-48 // BLOCK)


def test_release_reaches_the_owner(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    lease = leased(reader, chain(64))
    assert leases(owner) == 1
    lease.release(delivered=True)
    assert not lease.valid()
    lease.release(delivered=True)
    eventually(lambda: leases(owner) == 0)
    assert owner.ledger.snapshot()["holdings"] == 1, "reading does not consume"


def test_delivered_handoff_is_dropped(engine: Engine, eventually: Eventually) -> None:
    owner, reader = engine("owner"), None
    retain(owner, 64, purpose=Purpose.HANDOFF, request_id="r1")
    reader = engine("reader", peers={"o": owner.address})
    leased(reader, chain(64), handoff_request_id="r1").release(delivered=False)
    eventually(lambda: leases(owner) == 0)
    assert owner.ledger.snapshot()["handoffs"] == 1
    leased(reader, chain(64), handoff_request_id="r1").release(delivered=True)
    eventually(lambda: owner.ledger.snapshot()["handoffs"] == 0)


def test_short_handoff_is_found_by_its_request(engine: Engine) -> None:
    owner = engine("owner")
    retain(owner, 10, purpose=Purpose.HANDOFF, request_id="r1")
    reader = engine("reader", peers={"o": owner.address})
    assert leased(reader, chain(20), handoff_request_id="r1").tokens == 10
    assert ask(reader, chain(20)).reason == "no_holding"


def test_discarded_handoff(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner")
    retain(owner, 64, purpose=Purpose.HANDOFF, request_id="r1")
    reader = engine("reader", peers={"o": owner.address})
    eventually(lambda: connected(reader))
    reader.discard_handoff("owner", "r1")
    eventually(lambda: owner.ledger.snapshot()["handoffs"] == 0)


def test_renewal_outlives_the_first_duration(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, lease_s=1.5)
    lease = leased(reader, chain(64))
    first = lease.deadline
    eventually(lambda: time.monotonic() > first)
    assert lease.valid()
    assert leases(owner) == 1
    assert reader.status()["client"]["counters"]["lease.renewed"] >= 1
    lease.release(delivered=False)
    eventually(lambda: leases(owner) == 0)


def test_lease_refused_by_the_owner_is_lost(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, lease_s=0.4)
    lease = leased(reader, chain(64))
    owner.ledger.release(lease.lease_id, delivered=False)
    eventually(lambda: lease.lost)
    assert not lease.valid()


def test_reader_never_believes_longer_than_the_owner(engine: Engine) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, lease_s=30.0)
    lease = leased(reader, chain(64))
    (kept,) = owner.ledger._leases.values()
    assert lease.deadline <= kept.expires_s


def test_all_peers_are_asked_and_the_longest_wins(engine: Engine, eventually: Eventually) -> None:
    owners = [engine(f"owner{tokens}", hold=tokens) for tokens in (64, 256, 128)]
    reader = engine("reader", peers={f"o{i}": o.address for i, o in enumerate(owners)})
    eventually(lambda: connected(reader))
    result = ask(reader, chain(300))
    assert result.asked == 3
    assert result.lease is not None
    assert result.lease.peer.engine_id == "owner256"
    eventually(lambda: [leases(owner) for owner in owners] == [0, 1, 0])


@pytest.mark.parametrize("name", ["o1", "owner1", "address"])
def test_ask_by_name_address_or_engine_id(
    engine: Engine, eventually: Eventually, name: str
) -> None:
    owners = [engine(f"owner{i}", hold=64) for i in (0, 1)]
    reader = engine("reader", peers={f"o{i}": o.address for i, o in enumerate(owners)})
    eventually(lambda: connected(reader))
    wanted = owners[1].address if name == "address" else name
    result = ask(reader, chain(64), ask=[wanted])
    assert result.asked == 1
    assert result.lease is not None
    assert result.lease.peer.engine_id == "owner1"


def test_unknown_names_are_ignored_and_counted(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    eventually(lambda: connected(reader))
    result = ask(reader, chain(64), ask=["tcp://10.0.0.1:22", "nobody", "x" * 10_000])
    assert (result.lease, result.reason) == (None, "no_peer")
    assert reader.status()["control"]["ask.unknown_peer"] == 3


def test_nobody_to_ask(engine: Engine) -> None:
    assert ask(engine("reader"), chain(64)).reason == "no_peer"


def test_min_tokens_are_not_worth_a_lease(engine: Engine) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    assert ask(reader, chain(200), min_tokens=64).reason == "no_holding"
    assert leases(owner) == 0
    assert leased(reader, chain(200), min_tokens=63).tokens == 64


def test_deadline_gives_a_result_and_no_lease_leaks(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    eventually(lambda: connected(reader))
    for _ in range(50):
        lookup = reader.lookup(chain(64), deadline_s=0.0)
        result = lookup.poll()
        assert result is not None
        assert (result.lease, result.reason) == (None, "timeout")
    for _ in range(50):
        lookup = reader.lookup(chain(64), deadline_s=5.0)
        lookup.cancel()
    assert ask(reader, chain(64)).reason == "found"
    eventually(lambda: leases(owner) == 1)


def slow_down(owner: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the owner answer lookups only when the event is set."""
    gate, lookup = threading.Event(), owner.ledger.lookup

    def wait(*args: object, **kwargs: object) -> object:
        gate.wait(10.0)
        return lookup(*args, **kwargs)

    monkeypatch.setattr(owner.ledger, "lookup", wait)
    return gate


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_answer_after_the_end_is_given_back(
    engine: Engine, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    eventually(lambda: connected(reader))
    gate = slow_down(owner, monkeypatch)
    lookup = reader.lookup(chain(64), deadline_s=0.05 if how == "deadline" else 10.0)
    if how == "cancel":
        eventually(lambda: reader.status()["client"]["lookups"] == 1)
        lookup.cancel()
    eventually(lookup.poll)
    gate.set()
    eventually(lambda: reader.status()["client"]["counters"].get("lease.released") == 1)
    eventually(lambda: leases(owner) == 0)


def test_best_answer_so_far_is_given_back_when_nobody_waits(
    engine: Engine, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = engine("fast", hold=64), engine("slow", hold=128)
    reader = engine("reader", peers={"f": fast.address, "s": slow.address})
    eventually(lambda: connected(reader))
    gate = slow_down(slow, monkeypatch)
    lookup = reader.lookup(chain(128), deadline_s=20.0)
    eventually(lambda: reader.status()["client"]["leases"] == 1)
    lookup.cancel()
    gate.set()
    eventually(lambda: reader.status()["client"]["leases"] == 0)
    eventually(lambda: leases(fast) == leases(slow) == 0)


def test_best_answer_so_far_counts_at_the_deadline(
    engine: Engine, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = engine("fast", hold=64), engine("slow", hold=128)
    reader = engine("reader", peers={"f": fast.address, "s": slow.address})
    eventually(lambda: connected(reader))
    gate = slow_down(slow, monkeypatch)
    lookup = reader.lookup(chain(128), deadline_s=1.0)
    eventually(lambda: reader.status()["client"]["leases"] == 1)
    result = lookup.wait(10.0)
    assert result is not None
    assert result.lease is not None
    assert result.lease.peer.engine_id == "fast"
    gate.set()
    eventually(lambda: leases(slow) == 0)
    assert result.lease.valid()


def test_outcomes_add_up(engine: Engine, eventually: Eventually) -> None:
    """Every lookup is counted once, whoever ended it."""
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    eventually(lambda: connected(reader))
    for at in range(60):
        lookup = reader.lookup(chain(64), deadline_s=(0.0, 0.0005, 10.0)[at % 3])
        if at % 2:
            lookup.cancel()
        else:
            result = lookup.wait(10.0)
            if result is not None and result.lease is not None:
                result.lease.release(delivered=False)
    ask(reader, chain(64), ask=["nobody"])

    def counted() -> int:
        counters = reader.status()["client"]["counters"]
        return sum(count for name, count in counters.items() if name.startswith("lookup."))

    eventually(lambda: counted() == 61)
    eventually(lambda: leases(owner) == 0)


def test_overlong_questions_are_cut(
    engine: Engine, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    monkeypatch.setattr(client, "MAX_CHAIN_NBYTES", 3 * 16)
    assert leased(reader, chain(500)).tokens == 48
    assert ask(reader, chain(64), handoff_request_id="x" * 10_000).reason == "found"


def test_not_ready_peers_are_waited_for(engine: Engine) -> None:
    owner = engine("owner", hold=64, ready=False)
    reader = engine("reader", peers={"o": owner.address})
    early = ask(reader, chain(64), deadline_s=0.5)
    assert (early.lease, early.reason) == (None, "timeout")
    lookup = reader.lookup(chain(64), deadline_s=10.0)
    owner.set_agents({0: b"now"})
    result = lookup.wait(10.0)
    assert result is not None
    assert result.lease is not None
    assert dict(result.lease.peer.agents) == {0: b"now"}


def test_new_metadata_is_fetched(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    eventually(lambda: connected(reader))
    owner.set_agents({0: b"second"})
    eventually(lambda: [dict(peer.agents) for peer in reader.engines()] == [{0: b"second"}])


def test_incompatible_peer_is_named_and_not_asked(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64, fingerprint={"model": "m", "dtype": "float16"})
    reader = engine(
        "reader", fingerprint={"model": "m", "dtype": "bfloat16"}, peers={"o": owner.address}
    )
    eventually(lambda: state(reader)[0] == "incompatible")
    reason = state(reader)[1]
    assert "dtype" in reason
    assert "'bfloat16'" in reason
    assert "'float16'" in reason
    assert ask(reader, chain(64)).reason == "incompatible"
    assert owner.status()["server"]["refused.fingerprint"] >= 1
    assert reader.engines() == []


def test_one_engine_id_is_one_process(engine: Engine, eventually: Eventually) -> None:
    one, two = engine("same", hold=64), engine("same", hold=64)
    reader = engine("reader", peers={"a": one.address, "b": two.address})
    eventually(lambda: sorted(p.state for p in reader.peers()) == ["connected", "incompatible"])
    (refused,) = [peer for peer in reader.peers() if peer.state == "incompatible"]
    assert "engine id 'same'" in refused.reason
    assert ask(reader, chain(64)).asked == 1


def test_two_addresses_of_one_engine_are_asked_once(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    other = owner.address.replace("127.0.0.1", "127.0.0.2")
    reader = engine("reader", peers={"a": owner.address, "b": other})
    eventually(lambda: any(peer.state == "connected" for peer in reader.peers()))
    assert ask(reader, chain(64)).asked == 1


def test_own_address_among_the_peers(engine: Engine, eventually: Eventually) -> None:
    first = engine("me")
    port = first.address.rsplit(":", 1)[1]
    first.close(5.0)
    again = engine("me", listen=f"tcp://127.0.0.1:{port}", peers={"me": first.address})
    eventually(lambda: state(again) == ("incompatible", "this is me"))


def test_admit_needs_the_secrets_signature(engine: Engine, eventually: Eventually) -> None:
    secret = "a secret of the cluster"
    owner = engine("owner", hold=64, secret=secret)
    reader = engine("reader", secret=secret)
    assert owner.address_token()
    assert not reader.admit(owner.address, "0" * 32)
    assert not reader.admit("tcp://10.1.2.3:4", owner.address_token())
    assert not engine("open").admit(owner.address, owner.address_token())
    assert reader.peers() == []
    assert reader.admit(owner.address, owner.address_token())
    # The engine id is not known yet, and still the request finds its owner.
    assert leased(reader, chain(64), ask=["owner"]).tokens == 64


def test_admitted_peers_are_bounded(engine: Engine, eventually: Eventually) -> None:
    secret = "a secret of the cluster"
    owners = [engine(f"owner{i}", secret=secret, hold=64) for i in range(4)]
    reader = engine("reader", secret=secret, max_dynamic_peers=2)
    for owner in owners:
        assert reader.admit(owner.address, owner.address_token())
        assert reader.admit(owner.address, owner.address_token())
        assert leased(reader, chain(64), ask=[owner.identity.engine_id]).tokens == 64
    assert [peer.engine_id for peer in reader.peers()] == ["owner2", "owner3"]


def test_lookups_after_close(engine: Engine) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address})
    reader.close(5.0)
    assert ask(reader, chain(64)).reason == "closed"
    with pytest.raises(ClosedError):
        reader.start()


def test_closing_gives_leases_back(engine: Engine, eventually: Eventually) -> None:
    owner = engine("owner", hold=64)
    reader = engine("reader", peers={"o": owner.address}, lease_s=30.0)
    lease = leased(reader, chain(64))
    reader.close(5.0)
    assert not lease.valid()
    eventually(lambda: leases(owner) == 0)


def test_address_in_use_is_a_configuration_error(engine: Engine) -> None:
    taken = engine("one").address
    with pytest.raises(ConfigError, match="listen"):
        engine("two", listen=taken)


def test_ipv6_loopback(engine: Engine) -> None:
    try:
        owner = engine("owner", hold=64, listen="tcp://[::1]:0")
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    assert owner.address.startswith("tcp://[::1]:")
    reader = engine("reader", peers={"o": owner.address})
    assert leased(reader, chain(64)).tokens == 64
