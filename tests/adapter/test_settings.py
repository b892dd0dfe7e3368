"""Settings, addresses, identity and the params of a request: right or refused by name."""

from __future__ import annotations

import json
import re
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport.errors import ConfigError, UnknownOptionError, UnsupportedError
from kvtransport_vllm import compat, config, engine, params, tenants
from kvtransport_vllm.identity import model_digest, weights_digest


def test_defaults_are_upstreams():
    settings = config.load({})
    assert settings.decoder_kv_blocks_ttl == 480
    assert settings.kv_recompute_threshold == 64
    assert settings.failure_policy == "recompute"


def test_a_ttl_of_0_is_a_way_to_say_off():
    settings = config.load({"decoder_kv_blocks_ttl": 0})
    assert engine.retention_options(settings)["decoder_kv_blocks_ttl"] == 0


def test_unknown_key_names_the_nearest():
    with pytest.raises(UnknownOptionError, match="decoder_kv_blocks_ttl"):
        config.load({"decoder_kv_block_ttl": 480})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_kv_blocks_ttl", -1),
        ("decoder_kv_blocks_ttl", 700_000),
        ("lease_s", -1),
        ("lookup_timeout_s", "soon"),
        ("kv_recompute_threshold", -1),
        ("group_tokens", 0),
        ("failure_policy", "maybe"),
        ("bidirectional_kv_xfer", "yes please"),
        ("transfer_timeout_s", float("nan")),
    ],
)
def test_bad_value_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=key):
        config.load({key: value})


def test_quotas_name_tenants_as_the_ledger_does():
    label = tenants.label("acme")
    config.load({"retention_config": {"tenant_quotas": {label: 0.5, "": 0.25}}})
    with pytest.raises(ConfigError, match=r"tenant_quotas\['acme'\].*kvt tenant"):
        config.load({"retention_config": {"tenant_quotas": {"acme": 0.5}}})


def test_a_tenant_is_what_stands_before_the_dot():
    label = tenants.label("secret-salt")
    assert re.fullmatch("[0-9a-f]{12}", label)
    assert label == tenants.label("secret-salt.") == tenants.label("secret-salt.one.two")
    others = map(tenants.label, ("secret-salt1", "\ud800"))
    assert len({label, *others}) == 3
    assert tenants.label(None) == tenants.label("") == tenants.label(".session") == ""


def test_peers_may_have_names():
    unnamed = config.load({"peers": ["tcp://127.0.0.1:1"]}).named_peers
    named = config.load({"peers": {"d": "tcp://127.0.0.1:1"}}).named_peers
    assert (unnamed, named) == (
        {"tcp://127.0.0.1:1": "tcp://127.0.0.1:1"},
        {"d": "tcp://127.0.0.1:1"},
    )


def test_each_data_parallel_rank_has_its_port():
    assert engine.shift_port("tcp://[::1]:5601", 2) == "tcp://[::1]:5603"
    assert engine.shift_port("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    assert engine.shift_port("", 2) == ""


def test_addresses_of_either_family_are_taken_apart():
    assert engine.split_address("tcp://[::1]:5601") == ("::1", 5601)
    assert engine.split_address("tcp://127.0.0.1:5601") == ("127.0.0.1", 5601)


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "dev"])
def test_supported_versions(version):
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "1.0.0"])
def test_unsupported_version_is_named(version):
    with pytest.raises(UnsupportedError, match=version):
        compat.check_version(version)


def request_of(**fields):
    defaults = {"num_computed_tokens": 0, "num_in_flight_tokens": 0, "num_tokens": 0}
    return SimpleNamespace(**{**defaults, **fields})


def test_tokens_in_flight_and_the_last_sampled_one_do_not_count():
    assert engine.computed_tokens(request_of(num_computed_tokens=10, num_tokens=11)) == 10
    assert engine.computed_tokens(request_of(num_computed_tokens=11, num_tokens=11)) == 10
    aborted = request_of(num_computed_tokens=8, num_in_flight_tokens=8, num_tokens=30)
    assert engine.computed_tokens(aborted) == 0


def checkpoint(folder, values):
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    text = json.dumps(header).encode()
    data = struct.pack("<4f", *values)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(folder)


def test_weights_are_known_by_content_not_by_path(tmp_path):
    one = weights_digest(checkpoint(tmp_path / "one", (1, 2, 3, 4)), None)
    same = weights_digest(checkpoint(tmp_path / "same", (1, 2, 3, 4)), None)
    other = weights_digest(checkpoint(tmp_path / "other", (1, 2, 3, 5)), None)
    assert one == same != other
    assert weights_digest("org/model", "abc") == "org/model@abc"


def test_model_is_known_by_its_configuration():
    def of(**facts):
        return model_digest(SimpleNamespace(to_dict=lambda: facts))

    assert of(layers=2, _name_or_path="/a") == of(layers=2, _name_or_path="/b")
    assert of(layers=2) != of(layers=3)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = [
    "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_request_id",
    "kvt_ask", "kvt_reuse", "kvt_address", "kvt_address_token", "kvt_conversation",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(), anything) | anything)
def test_whatever_a_caller_sends_is_read_or_named(raw):
    read = params.parse(raw)
    assert isinstance(read.prefill_only, bool)
    assert all(isinstance(name, str) and len(name) <= 256 for name in read.targets)
    assert len(read.conversation) <= 64
    assert set(read.refused) <= {*KEYS, "kv_transfer_params"}


def test_a_conversations_name_is_bounded():
    assert params.parse({"kvt_conversation": "c" * 64}).conversation == "c" * 64
    refused = params.parse({"kvt_conversation": "c" * 65})
    assert (refused.conversation, refused.refused) == ("", ("kvt_conversation",))
