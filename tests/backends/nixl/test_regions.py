"""Registering memory, describing it to peers, and withdrawing it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.nixl_peer import pattern
from support.nixl_side import LOCAL, REMOTE, blocks, scattered

from kvtransport.backend import Op
from kvtransport.errors import (
    IncompatiblePeerError,
    KVTransportError,
    MalformedMetadataError,
    StaleDescriptorError,
    UnsupportedError,
)
from kvtransport_backends.nixl.body import Body, decode, encode

SIZE = 4 << 20


def test_a_region_registered_anew_replaces_the_old_one(pair):
    local, remote = pair
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None
    remote.ask("deregister", region=REMOTE)
    remote.ask("rename", old=REMOTE, new=REMOTE + 1)
    remote.ask("register", region=REMOTE + 1)
    local.backend.import_peer(1, remote.export())
    with pytest.raises(StaleDescriptorError):
        local.post(Op.READ, scattered(4, 4096, SIZE))
    what = scattered(4, 4096, SIZE, remote_region=REMOTE + 1)
    assert local.run(Op.READ, what).error is None


def test_a_region_can_be_withdrawn_while_its_table_is_prepared(pair):
    local, _ = pair
    what = scattered(64, 4096, SIZE)
    for _ in range(3):
        assert local.run(Op.READ, what).error is None
    local.backend.deregister(LOCAL)
    with pytest.raises(StaleDescriptorError):
        local.post(Op.READ, what)
    local.register(LOCAL + 1, local.memory)
    again = blocks(4096, [0], [8192], local_region=LOCAL + 1)
    for _ in range(3):
        assert local.run(Op.READ, again).error is None
    assert (local.memory[:4096] == pattern(SIZE, 1)[8192 : 8192 + 4096]).all()


def test_one_buffer_registered_twice(pair):
    local, _ = pair
    local.register(LOCAL + 1, local.memory)
    for region in (LOCAL, LOCAL + 1):
        assert local.run(Op.READ, blocks(4096, [0], [0], local_region=region)).error is None
    local.backend.deregister(LOCAL)
    assert local.run(Op.READ, blocks(4096, [0], [0], local_region=LOCAL + 1)).error is None


def test_overlapping_host_regions_are_kept_apart(pair):
    local, _ = pair
    part = local.memory[8192 : 8192 + 65536]
    local.register(LOCAL + 1, part)
    theirs = pattern(SIZE, 1)
    assert local.run(Op.READ, blocks(4096, [0], [0], local_region=LOCAL + 1)).error is None
    assert (part[:4096] == theirs[:4096]).all()
    assert local.run(Op.READ, blocks(4096, [8192], [4096])).error is None
    assert (part[:4096] == theirs[4096:8192]).all()


def test_regions_of_odd_sizes_and_addresses(pair):
    local, _ = pair
    memory = np.zeros(10_000, np.uint8)
    theirs = pattern(SIZE, 1)
    for index, size in enumerate((1, 63, 4097)):
        region = LOCAL + 1 + index
        local.register(region, memory[1 + index : 1 + index + size])
        what = blocks(size, [0], [11], local_region=region)
        assert local.run(Op.READ, what).error is None
        assert (memory[1 + index : 1 + index + size] == theirs[11 : 11 + size]).all()


def test_regions_added_later_are_learnt_without_disturbing_the_others(pair):
    local, remote = pair
    for extra in range(1, 6):
        remote.ask("alloc", region=REMOTE + extra, nbytes=65536, seed=extra)
        remote.ask("register", region=REMOTE + extra)
        local.backend.import_peer(1, remote.export())
        what = blocks(4096, [0], [0], remote_region=REMOTE + extra)
        assert local.run(Op.READ, what).error is None
        assert (local.memory[:4096] == pattern(65536, extra)[:4096]).all()
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None


def test_a_kind_that_the_backend_does_not_have(here):
    local = here()
    with pytest.raises(UnsupportedError, match="'neuron'"):
        local.register(LOCAL + 1, np.zeros(64, np.uint8), kind="neuron")


def test_torch_on_rocm_calls_its_devices_cuda(here):
    local = here({"module": "nixl_cu12"}, backend="rocm")
    with pytest.raises(UnsupportedError, match="register it as 'rocm'"):
        local.register(LOCAL + 1, np.zeros(64, np.uint8), kind="cuda")


def test_rocm_speaks_with_cuda_hosts(here, there):
    """One wire: both are NIXL on UCX.  On host memory; no GPU takes part here."""
    remote = there()
    local = here({"module": "nixl_cu12"}, backend="rocm")
    local.backend.import_peer(1, remote.export())
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None


def test_damaged_metadata_is_refused_before_nixl_sees_it(pair):
    local, remote = pair
    body = remote.export()
    rng = random.Random(71)
    for _ in range(300):
        damaged = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
        with pytest.raises(MalformedMetadataError):
            local.backend.import_peer(2, bytes(damaged[: rng.randrange(len(damaged) + 1)]))
        with pytest.raises(MalformedMetadataError):
            local.backend.import_peer(2, bytes(damaged))
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None


def test_well_formed_nonsense_leaves_the_agent_usable(pair):
    local, remote = pair
    good = decode(remote.export(), plugin="UCX", backend="cuda")
    nonsense = [
        Body("UCX", "stranger", b"\x00" * 64, ()),
        Body("UCX", "stranger", good.connection, good.regions),
        Body("UCX", "stranger", b"nixlSerDes|Agent", ()),
    ]
    for body in nonsense:
        with pytest.raises(KVTransportError):
            local.backend.import_peer(2, encode(body))
    assert local.run(Op.READ, scattered(4, 4096, SIZE)).error is None


def test_another_plugin_is_incompatible(pair):
    local, remote = pair
    body = decode(remote.export(), plugin="UCX", backend="cuda")
    other = encode(Body("LIBFABRIC", body.agent, body.connection, body.regions))
    with pytest.raises(IncompatiblePeerError, match="LIBFABRIC"):
        local.backend.import_peer(2, other)


@pytest.mark.parametrize(
    ("field", "value"),
    [("address", (1 << 64) - 10), ("nbytes", 0), ("nbytes", -5), ("address", -1)],
)
def test_impossible_ranges_are_malformed(pair, field, value):
    import msgspec

    local, remote = pair
    body = decode(remote.export(), plugin="UCX", backend="cuda")
    entry = msgspec.structs.replace(body.regions[-1], **{field: value})
    forged = encode(msgspec.structs.replace(body, regions=(entry,)))
    with pytest.raises(MalformedMetadataError):
        local.backend.import_peer(2, forged)
