"""Metadata: versions first, then the header, then the rest."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.loopback import CAPABILITIES, Loopback, LoopbackConfig

from kvtransport import metadata
from kvtransport.agent import Agent
from kvtransport.errors import (
    IncompatiblePeerError,
    KVTransportError,
    MalformedMetadataError,
    PeerLostError,
    StaleDescriptorError,
)
from kvtransport.layout.blocks import Pair
from kvtransport.metadata import Body, Header, RegionEntry, decode_body, encode, open_metadata
from kvtransport.peer import PeerState

GOLD = Path(__file__).parent / "data" / "metadata-schema1-spi1.bin"

HEADER = Header("decode-0", bytes(range(16)), 3, "gold/1", b"\xaa" * 8)
BODY = Body(
    CAPABILITIES,
    (
        RegionEntry(1, 1, "kv.0", 1 << 40, "host", 0, frozenset({"read"})),
        RegionEntry(2, 5, "kv.1", 4096, "cuda", 7, frozenset({"read", "write"})),
    ),
    b"\x00backend\xff",
)


def reseal(payload: bytes, schema: int = 1, api: int = 1) -> bytes:
    """Metadata with correct checksums around any payload and versions."""
    head = struct.pack(">4sHHII", b"KVTM", schema, api, len(payload), zlib.crc32(payload))
    return head + struct.pack(">I", zlib.crc32(head)) + payload


def test_gold_bytes_still_decode():
    header, raw = open_metadata(GOLD.read_bytes())
    assert header == HEADER
    assert decode_body(raw) == BODY


def test_encoding_is_the_gold_one():
    assert encode(HEADER, BODY) == GOLD.read_bytes()


@pytest.mark.parametrize(
    ("schema", "api", "words"),
    [(2, 1, "metadata schema version differs: peer has 2, this agent has 1"),
     (1, 9, "backend contract version differs: peer has 9, this agent has 1")],
)  # fmt: skip
def test_foreign_version_is_refused_before_the_body_is_looked_at(duo, schema, api, words):
    with pytest.raises(IncompatiblePeerError, match=words):
        duo.a.agent.add_peer(reseal(b"not even messagepack", schema, api))


@pytest.fixture
def other():
    with Agent(Loopback(), name="other", fingerprint=b"right") as agent:
        agent.register(bytearray(64), name="kv")
        yield agent


def test_fingerprint_and_wire_come_before_any_import(other):
    backend = Loopback()
    with Agent(backend, name="x", fingerprint=b"wrong") as agent:
        with pytest.raises(
            IncompatiblePeerError, match=r"fingerprint.*other.*7269676874.*77726f6e67"
        ):
            agent.add_peer(other.metadata())
        header, raw = open_metadata(other.metadata())
        foreign = Header(header.name, header.incarnation, header.epoch, "acme/3", b"wrong")
        payload = metadata._encoder.encode(metadata._Payload(foreign, raw))
        with pytest.raises(IncompatiblePeerError, match=r"'acme/3'.*'loopback/1'"):
            agent.add_peer(reseal(payload))
        assert agent.peers == ()
        assert backend.calls == []


@pytest.mark.parametrize(
    "blob",
    [b"", b"KVTM", bytes(20), b"x" * 100, "text", None, 7, reseal(b""), reseal(b"\xc1"),
     reseal(b"\x92\xc0\xc0"), bytes(metadata.MAX_METADATA_BYTES + 1)],
)  # fmt: skip
def test_garbage(duo, blob):
    with pytest.raises(MalformedMetadataError):
        duo.a.agent.add_peer(blob)


def test_every_truncation_and_flip_is_found(duo):
    blob = duo.b.agent.metadata()
    for end in range(len(blob)):
        with pytest.raises(MalformedMetadataError):
            duo.a.agent.add_peer(blob[:end])
    for i in range(len(blob)):
        flipped = bytearray(blob)
        flipped[i] ^= 0x41
        with pytest.raises(MalformedMetadataError):
            duo.a.agent.add_peer(bytes(flipped))
    assert duo.a.agent.add_peer(blob) is duo.peer


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resealed_damage_never_crashes(duo, data):
    """Correct checksums around damaged content: only typed errors come out."""
    payload = bytearray(encode(HEADER, BODY)[20:])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with pytest.raises(KVTransportError):
        duo.a.agent.add_peer(reseal(bytes(payload)))


@pytest.mark.parametrize(
    "entries",
    [
        (RegionEntry(1, 1, "a", 8, "host", 0, frozenset()),) * 2,
        (
            RegionEntry(1, 1, "a", 8, "host", 0, frozenset()),
            RegionEntry(2, 1, "a", 8, "host", 0, frozenset()),
        ),
        (RegionEntry(0, 1, "a", 8, "host", 0, frozenset()),),
        (RegionEntry(1, 1, "a", -8, "host", 0, frozenset()),),
        (RegionEntry(1, 1, "a", 8, "host", 0, frozenset({"execute"})),),
        (RegionEntry(1, 1, "", 8, "host", 0, frozenset()),),
        (RegionEntry(1, 1, "a" * 257, 8, "host", 0, frozenset()),),
    ],
)
def test_impossible_regions(entries):
    blob = encode(HEADER, Body(CAPABILITIES, entries, b""))
    with pytest.raises(MalformedMetadataError):
        decode_body(open_metadata(blob)[1])


def test_deep_nesting_is_refused(duo):
    with pytest.raises(MalformedMetadataError):
        duo.a.agent.add_peer(reseal(b"\x91" * 100_000 + b"\xc0"))


class TestIncarnations:
    def test_same_bytes_same_peer(self, duo):
        blob = duo.b.agent.metadata()
        calls = len(duo.a.backend.calls)
        assert duo.a.agent.add_peer(blob) is duo.peer
        assert len(duo.a.backend.calls) == calls, "nothing new, nothing imported"

    def test_older_export_changes_nothing(self, duo):
        old = duo.b.agent.metadata()
        duo.b.agent.register(bytearray(8), name="later")
        new = duo.b.agent.metadata()
        assert duo.a.agent.add_peer(new) is duo.peer
        assert duo.a.agent.add_peer(old) is duo.peer
        assert set(duo.peer.regions) == {"kv", "later"}

    def test_restart_makes_a_new_peer(self, duo):
        duo.b.agent.close()
        with Agent(Loopback(), name="b", config=duo.config) as again:
            again.register(bytearray(b"z" * 64), name="kv")
            peer = duo.a.agent.add_peer(again.metadata())
            assert peer is not duo.peer
            assert duo.peer.state is PeerState.RETIRED
            assert f"drop {duo.peer.peer_id}" in duo.a.backend.calls
            with pytest.raises(StaleDescriptorError, match="retired"):
                duo.a.agent.read(duo.peer, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)])
            pairs = [Pair.ranges(duo.a.region, [0], peer.region("kv"), [0], 64)]
            duo.a.agent.read(peer, pairs).wait(1)
            assert bytes(duo.a.memory[:64]) == b"z" * 64
            with pytest.raises(StaleDescriptorError, match="not what peer"):
                duo.a.agent.read(peer, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)])

    def test_metadata_of_a_retired_incarnation_does_not_come_back(self, duo):
        old = duo.b.agent.metadata()
        with Agent(Loopback(), name="b", config=duo.config) as again:
            peer = duo.a.agent.add_peer(again.metadata())
            with pytest.raises(StaleDescriptorError, match="earlier incarnation"):
                duo.a.agent.add_peer(old)
            assert peer.state is PeerState.CONNECTED

    def test_old_incarnation_is_kept_until_its_transfers_end(self, duo):
        duo.a.backend.held = True
        pairs = [Pair.ranges(duo.a.region, [0], duo.remote, [0], 10)]
        transfer = duo.a.agent.read(duo.peer, pairs)
        with Agent(Loopback(), name="b", config=duo.config) as again:
            duo.a.agent.add_peer(again.metadata())
            assert f"drop {duo.peer.peer_id}" not in duo.a.backend.calls
            duo.a.backend.finish_all()
            transfer.wait(1)
            assert f"drop {duo.peer.peer_id}" in duo.a.backend.calls

    def test_failed_import_keeps_the_former_peer(self, duo):
        with Agent(Loopback(), name="b", config=duo.config) as again:
            blob = again.metadata()
        with pytest.raises(PeerLostError):
            duo.a.agent.add_peer(blob)
        assert duo.peer.state is PeerState.CONNECTED
        duo.a.agent.read(duo.peer, [Pair.ranges(duo.a.region, [0], duo.remote, [0], 1)]).wait(1)

    def test_own_metadata_is_refused(self, duo):
        with pytest.raises(IncompatiblePeerError, match="itself"):
            duo.a.agent.add_peer(duo.a.agent.metadata())

    def test_removed_peer(self, duo):
        duo.a.agent.remove_peer(duo.peer)
        duo.a.agent.remove_peer(duo.peer)
        with pytest.raises(StaleDescriptorError, match="removed"):
            duo.a.agent.read(duo.peer, [])
        peer = duo.a.agent.add_peer(duo.b.agent.metadata())
        assert peer.peer_id != duo.peer.peer_id


def test_a_region_with_another_generation_is_another_region(duo):
    from dataclasses import replace

    newer = replace(duo.remote, generation=2)
    duo.peer.update([newer], 99, b"")
    assert duo.peer.knows(newer)
    assert not duo.peer.knows(duo.remote)


def test_unknown_region_names_the_nearest(duo):
    from kvtransport.errors import DescriptorError

    with pytest.raises(DescriptorError, match="no region 'kv0'; did you mean 'kv'"):
        duo.peer.region("kv0")


def test_backend_that_raises_anything_else_on_import(duo):
    from kvtransport.errors import BackendContractError

    def import_peer(*_):
        raise UnicodeError("oops")

    duo.a.backend.import_peer = import_peer
    with Agent(Loopback(), name="c", config=duo.config) as third:
        blob = third.metadata()
    with pytest.raises(BackendContractError, match="UnicodeError"):
        duo.a.agent.add_peer(blob)
    assert [p.name for p in duo.a.agent.peers] == ["b"]


def test_regions_are_fixed_after_export_if_the_backend_says_so():
    from dataclasses import replace

    from kvtransport.errors import UnsupportedError

    config = LoopbackConfig(replace(CAPABILITIES, dynamic_regions=False))
    with Agent(Loopback(), name="d", config=config) as agent:
        agent.register(bytearray(8))
        agent.metadata()
        with pytest.raises(UnsupportedError):
            agent.register(bytearray(8))
