"""Settings, addresses, secrets, identity, the index and the timeline, each alone."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport.errors import AuthenticationError, ConfigError, IncompatiblePeerError
from kvtransport.lease import prefix_index
from kvtransport.lease.address import parse_address
from kvtransport.lease.block_counts import BlockCounts
from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import Holding, Lease, Purpose
from kvtransport.lease.identity import EngineIdentity, compare
from kvtransport.lease.prefix_index import PrefixIndex
from kvtransport.lease.security import ClusterSecret, load_secret, sign_address, verify_address
from kvtransport.lease.settings import ControlSettings, peers_from_config
from kvtransport.lease.timeline import Timeline

SECRET = ClusterSecret(b"a secret of the cluster")
SEED = chain_seed(b"parts")


# -- addresses and settings


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:5601", "tcp://[::1]:8000", "tcp://host-1.example:1", "tcp://*:7"]
)
def test_addresses_round_trip(text: str) -> None:
    assert str(parse_address(text, "listen")) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5601",
        "tcp://127.0.0.1",
        "tcp://:5601",
        "tcp://::1:5601",
        "tcp://[::1",
        "tcp://[xyz]:1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://h:1/x",
        "tcp://h:1\n",
        "http://h:1",
        "tcp://" + "h" * 300 + ":1",
    ],
)
def test_bad_addresses_name_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        parse_address(text, "listen")


def test_localhost_is_literal() -> None:
    assert str(parse_address("tcp://localhost:1", "listen")) == "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "tcp://0.0.0.0:5601"}, "listen.*cluster_secret_file"),
        ({"listen": "tcp://192.0.2.1:5601"}, "listen.*KVT_CLUSTER_SECRET"),
        ({"peers": {"d": "tcp://192.0.2.1:5601"}}, r"peers\[d\].*cluster_secret_file"),
        ({"listen": "tcp://0.0.0.0:5601", "secret": SECRET}, "advertise must be set"),
        ({"advertise": "tcp://0.0.0.0:5601", "secret": SECRET}, "advertise"),
        ({"peers": {"d": "tcp://192.0.2.1:1"}, "secret": SECRET}, "listen = tcp://127.0.0.1"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lookup_timeout_s": -1}, "lookup_timeout_s"),
        ({"max_message_bytes": 10}, "max_message_bytes"),
        ({"max_dynamic_peers": 0}, "max_dynamic_peers"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ControlSettings(**settings)


def test_remote_peers_with_a_secret_and_an_address() -> None:
    ControlSettings(
        listen="tcp://0.0.0.0:5601",
        advertise="tcp://192.0.2.7:5601",
        peers={"d": "tcp://192.0.2.1:5601"},
        secret=SECRET,
    )


def test_peers_from_config() -> None:
    assert peers_from_config(["a", "b"]) == {"a": "a", "b": "b"}
    assert peers_from_config({"d": "a"}) == {"d": "a"}
    with pytest.raises(ConfigError, match="peers"):
        peers_from_config("tcp://127.0.0.1:1")


# -- secrets


def test_secret_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_secret() is None
    monkeypatch.setenv("KVT_CLUSTER_SECRET", "a secret of the cluster")
    assert load_secret() == SECRET
    file = tmp_path / "secret"
    file.write_bytes(b"another secret, from a file\n")
    file.chmod(0o600)
    assert load_secret(str(file)) == ClusterSecret(b"another secret, from a file")
    file.chmod(0o640)
    assert load_secret(str(file)) is not None, "a mounted secret is readable by its group"


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o620])
def test_secret_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET.value)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(str(file))


def test_missing_and_short_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster_secret_file.*No such file"):
        load_secret(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="16 bytes"):
        ClusterSecret(b"short")


def test_secret_shows_nothing() -> None:
    settings = ControlSettings(secret=SECRET)
    for text in (repr(SECRET), str(settings), repr(SECRET.curve_keys())):
        assert "a secret of the cluster" not in text
    assert SECRET.curve_keys().server_secret.decode() not in repr(SECRET.curve_keys())
    with pytest.raises(ConfigError) as refused:
        ClusterSecret(b"hunter2")
    assert "hunter2" not in str(refused.value)


def test_keys_differ_by_purpose_and_secret() -> None:
    other = ClusterSecret(b"another secret of others")
    keys = [*vars_of(SECRET), *vars_of(other)]
    assert len(set(keys)) == 8
    assert SECRET.curve_keys() == ClusterSecret(b"a secret of the cluster").curve_keys()


def vars_of(secret: ClusterSecret) -> tuple[bytes, ...]:
    keys = secret.curve_keys()
    return keys.server_public, keys.server_secret, keys.client_public, keys.client_secret


def test_address_tokens() -> None:
    address = "tcp://192.0.2.1:5601"
    token = sign_address(SECRET, address)
    verify_address(SECRET, address, token)
    for wrong in (
        (SECRET, "tcp://192.0.2.1:5602", token),
        (SECRET, address, token[:-1] + ("0" if token[-1] != "0" else "1")),
        (SECRET, address, ""),
        (SECRET, address, "é"),
        (ClusterSecret(b"another secret of others"), address, token),
    ):
        with pytest.raises(AuthenticationError):
            verify_address(*wrong)


# -- identity


def test_compare_names_field_and_both_values() -> None:
    compare({"a": "1"}, {"a": "1"})
    with pytest.raises(IncompatiblePeerError, match=r"dtype.*'half'.*'float'"):
        compare({"a": "1", "dtype": "half"}, {"a": "1", "dtype": "float"})
    with pytest.raises(IncompatiblePeerError, match=r"extra.*\(missing\).*'x'"):
        compare({"a": "1"}, {"a": "1", "extra": "x"})
    with pytest.raises(IncompatiblePeerError, match=r"a.*'1'.*\(missing\)"):
        compare({"a": "1"}, {})


def test_each_start_is_another_incarnation() -> None:
    assert EngineIdentity("e").incarnation != EngineIdentity("e").incarnation
    with pytest.raises(ConfigError, match="engine_id"):
        EngineIdentity("")


def test_fingerprint_bytes_are_canonical_and_injective() -> None:
    def coded(facts: dict[str, str]) -> bytes:
        return EngineIdentity("e", facts).fingerprint_bytes()

    assert coded({"a": "1", "b": "2"}) == coded({"b": "2", "a": "1"})
    variants = [{"a": "1"}, {"a1": ""}, {"a": "", "1": ""}, {}, {"a": "1", "b": ""}]
    assert len({coded(facts) for facts in variants}) == len(variants)


# -- index, timeline, counts


def held(holding_id: int, tokens: list[int]) -> Holding:
    chain = DigestChain.of(tokens, SEED)
    return Holding(
        holding_id, "", len(tokens), chain.digests, b"", (), Purpose.RETAINED, "", 0, 0, 0.0, 0.0
    )


words = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=12)


@given(
    st.lists(st.tuples(words, st.booleans()), max_size=40),
    st.lists(words, min_size=1, max_size=10),
    st.sampled_from([0, 1, 8]),
)
def test_index_finds_the_longest_prefix(
    changes: list[tuple[list[int], bool]], queries: list[list[int]], walk: int
) -> None:
    """Against a plain list; with and without the walk from the root."""
    index, kept = PrefixIndex(), {}
    with patch.object(prefix_index, "_WALK", walk):
        for number, (word, remove) in enumerate(changes):
            key = tuple(word)
            if remove and kept:
                victim = list(kept)[number % len(kept)]
                index.remove(kept.pop(victim))
                continue
            holding = held(number, [token for token in word for _ in range(16)])
            index.add(holding, index.find(holding.chain))
            kept[number, key] = holding
        for query in queries:
            chain = DigestChain.of([token for token in query for _ in range(16)], SEED).digests
            place = index.find(chain)
            shared = {at: prefix_index.common_groups(h.chain, chain) for at, h in kept.items()}
            best = max(shared.values(), default=0)
            assert place.depth == best
            if best:
                found = index.any_holding(place.node)
                assert found is not None
                assert prefix_index.common_groups(found.chain, chain) == best
            whole = {h.holding_id for h in kept.values() if chain.startswith(h.chain)}
            assert {h.holding_id for h in index.prefixes(place)} == whole
    assert len(index) <= 2 * len(kept)
    for holding in kept.values():
        index.remove(holding)
        index.remove(holding)
    assert len(index) == 0
    assert not index._handles


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=200))
def test_timeline_is_a_sorted_list(changes: list[tuple[int, int]]) -> None:
    line: Timeline[Lease] = Timeline()
    entries = [Lease(i, held(0, [1]), "", "", 0.0, 0.0) for i in range(21)]
    queued: dict[int, int] = {}
    for at, (number, due) in enumerate(changes):
        entry = entries[number]
        if at % 5 == 4:
            line.discard(entry)
            queued.pop(number, None)
        else:
            entry.expires_s = float(due)
            line.add(entry)
            queued[number] = due
        assert len(line) == len(queued)
    for now in range(21):
        out = set()
        while (entry := line.due(float(now))) is not None:
            out.add(entry.lease_id)
        assert out == {number for number, due in queued.items() if due == now}
    assert len(line) == 0


def test_timeline_forgets_what_was_taken_out() -> None:
    line: Timeline[Lease] = Timeline()
    for i in range(10_000):
        entry = Lease(i, held(0, [1]), "", "", 0.0, 1e9)
        line.add(entry)
        line.discard(entry)
    assert len(line._heap) <= 64


def test_block_counts_grow_and_refuse_negative_ids() -> None:
    import numpy as np

    counts = BlockCounts(4, null_block=0)
    first = counts.positions(
        (np.array([0, 1, 2], dtype=np.int32), np.array([0, 3], dtype=np.int32))
    )
    counts.add(first)
    assert counts.distinct == 3
    far = counts.positions((np.array([3, 1000], dtype=np.int32),))
    counts.add(far)
    assert counts.distinct == 4
    assert counts.remove(first) == 2
    assert counts.remove(far) == 2
    assert counts.distinct == 0
    wrong = counts.positions((np.array([1, -1], dtype=np.int32),))
    with pytest.raises(ConfigError, match="negative"):
        counts.add(wrong)
    assert counts.distinct == 0


def test_importing_leases_loads_no_engine_and_no_driver() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kvtransport.lease.control, kvtransport.policy.cost_model\n"
        "bad = {'torch', 'vllm', 'nixl', 'nixl_cu12'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50, env=dict(os.environ))
