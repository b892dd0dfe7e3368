"""The parts without a second process: options, vectors, tables, metadata, probe."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtransport.agent import Agent
from kvtransport.errors import (
    BackendUnavailableError,
    ConfigError,
    DescriptorError,
    MalformedMetadataError,
    OutOfBoundsError,
    StaleDescriptorError,
)
from kvtransport.layout.blocks import Pair
from kvtransport_backends.host import INFO, HostConfig, _body, _sys
from kvtransport_backends.host import backend as backend_module
from kvtransport_backends.host._body import RegionEntry
from kvtransport_backends.host._guard import Guard
from kvtransport_backends.host._probe import probe
from kvtransport_backends.host._table import RegionTable
from kvtransport_backends.host._vectors import Vectors, split
from kvtransport_backends.host._vm import VmMemory
from kvtransport_backends.host.backend import HostBackend
from kvtransport_backends.host.config import join_address, split_address


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": "rdma"}, "path must be one of auto, vm, tcp"),
        ({"listen": "0.0.0.0:0"}, "set advertise"),
        ({"listen": "[::]:0"}, "set advertise"),
        ({"listen": "localhost:0"}, "IP address"),
        ({"listen": "127.0.0.1"}, "listen must look like"),
        ({"listen": "127.0.0.1:99999"}, "listen must look like"),
        ({"advertise": "host:x"}, "advertise must look like"),
        ({"copy_threads": 0}, "copy_threads must be between"),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s must be between"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HostConfig(**options)


@pytest.mark.parametrize("address", [("127.0.0.1", 5600), ("::1", 1), ("node-3.example", 65535)])
def test_addresses_round_trip(address: tuple[str, int]) -> None:
    assert split_address(join_address(*address), "x") == address


def test_advertised_address_is_what_peers_get(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent({"listen": "0.0.0.0:0", "advertise": "node-7"})
    host, port = split_address(agent._backend._server.body().address, "x")
    assert host == "node-7"
    assert port > 0
    agent = make_agent({"listen": "0.0.0.0:0", "advertise": "[fd00::1]:99"})
    assert agent._backend._server.body().address == "[fd00::1]:99"


def test_listens_on_loopback_unless_told(make_agent: Callable[..., Agent]) -> None:
    server = make_agent()._backend._server
    bound = [sock.getsockname() for sock in server._listener._sockets]
    assert bound[1][0] == "127.0.0.1"
    assert bound[0][:1] == b"\0"


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BackendUnavailableError, match=address):
            Agent.open("host", name="x", config={"listen": address})


def test_capabilities_are_a_function_of_the_options() -> None:
    vm, tcp = (HostBackend.capabilities(HostConfig(path=path)) for path in ("vm", "tcp"))
    assert vm.target_enforces == frozenset()
    assert tcp.target_enforces == {"bounds", "access", "stale_key"}
    assert set(vm.path_evidence) <= set(HostBackend().counters())
    assert INFO.load() is HostBackend


def test_probe_says_what_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(HostConfig()).details["vm"] == "usable"

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(_sys, "process_vm_readv", refuse)
    found = probe(HostConfig(path="vm"))
    assert not found.available
    assert "no process_vm_readv" in found.reason
    assert "auto" in found.hint
    assert probe(HostConfig()).available
    monkeypatch.setattr(_sys, "is_linux", lambda: False)
    assert "Linux" in probe(HostConfig()).reason


def test_ptracer_is_allowed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yama at level 1, or a kernel without it, which answers EINVAL."""
    calls = []
    monkeypatch.setattr(backend_module, "yama_scope", lambda: 1)
    monkeypatch.setattr(_sys, "allow_any_ptracer", lambda: calls.append(1))
    for options in ({}, {"allow_ptracer": True, "path": "tcp"}, {"allow_ptracer": True}):
        Agent.open("host", name="x", config=options).close()
    assert calls == [1]
    monkeypatch.undo()
    if not Path("/proc/sys/kernel/yama").exists():
        monkeypatch.setattr(backend_module, "yama_scope", lambda: 1)
        with pytest.raises(BackendUnavailableError, match="unset allow_ptracer"):
            Agent.open("host", name="x", config={"allow_ptracer": True})


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    limit=st.integers(1, 60),
    steps=st.lists(st.integers(1, 64), min_size=1),
)
def test_vectors_visit_every_byte_once(lengths: list[int], limit: int, steps: list[int]) -> None:
    """However a system call stops in between, the windows cover exactly what is left."""
    sizes = np.array(lengths, np.uint64)
    starts = np.arange(len(lengths), dtype=np.uint64) * np.uint64(100)
    vectors = Vectors(starts, sizes)
    base = vectors._pointer
    seen: list[int] = []
    turn = 0
    while vectors.remaining:
        pointer, count = vectors.window(limit)
        first = (pointer - base) // 16
        rows = vectors._rows[first : first + count].tolist()
        window = [start + i for start, size in rows for i in range(size)]
        assert count == 1 or len(window) <= limit
        moved = min(steps[turn % len(steps)], len(window))
        seen += window[:moved]
        vectors.advance(moved)
        turn += 1
    assert seen == [100 * row + i for row, size in enumerate(lengths) for i in range(size)]
    assert vectors.done == vectors.total == sum(lengths)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20), limit=st.integers(1, 64))
def test_split_covers_every_descriptor_in_order(lengths: list[int], limit: int) -> None:
    owner, inner, nbytes = split(np.array(lengths, np.uint64), limit)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for row, start, size in zip(owner.tolist(), inner.tolist(), nbytes.tolist(), strict=True):
        assert 0 < size <= limit
        pieces.setdefault(row, []).append((start, size))
    for row, length in enumerate(lengths):
        end = 0
        for start, size in pieces[row]:
            assert start == end
            end += size
        assert end == length


REGIONS = [RegionEntry(3, 1000, 100, 3, 0), RegionEntry(7, 5000, 50, 1, 1)]


@given(
    region=st.sampled_from([0, 3, 7, 8]),
    offset=st.one_of(st.integers(0, 200), st.integers(2**64 - 200, 2**64 - 1)),
    nbytes=st.one_of(st.integers(0, 200), st.integers(2**64 - 200, 2**64 - 1)),
    need=st.sampled_from(["read", "write", "local"]),
)
@example(region=3, offset=50, nbytes=2**64 - 10, need="read")
@example(region=3, offset=2**64 - 10, nbytes=50, need="read")
def test_table_lets_nothing_outside_through(
    region: int, offset: int, nbytes: int, need: Any
) -> None:
    """Against plain integers, which do not wrap."""
    table = RegionTable(REGIONS)
    entry = {entry.region_id: entry for entry in REGIONS}.get(region)
    vectors = (
        np.array([3, region], np.int64),
        np.array([0, offset], np.uint64),
        np.array([1, nbytes], np.uint64),
    )
    expected: type[Exception] | None = None
    if entry is None:
        expected = StaleDescriptorError
    elif nbytes == 0 or offset + nbytes > entry.nbytes:
        expected = OutOfBoundsError
    elif need == "write" and not entry.access & 2:
        expected = DescriptorError
    if expected:
        with pytest.raises(expected):
            table.locate(*vectors, need)
        return
    assert entry is not None
    used, addresses = table.locate(*vectors, need)
    assert addresses.tolist() == [1000, entry.address + offset]
    assert table.region_ids(used).tolist() == sorted({3, region})


def test_guard_shows_what_is_registered() -> None:
    nonce = os.urandom(16)
    guard = Guard(nonce, 2)
    memory = VmMemory(os.getpid(), guard.address, nonce)
    slots = [guard.acquire(10), guard.acquire(11)]
    assert guard.acquire(12) is None
    both = np.array(slots, np.intp)
    memory.check(both, np.array([11, 12]))
    guard.release(slots[0])
    with pytest.raises(StaleDescriptorError):
        memory.check(both, np.array([11, 12]))
    assert guard.acquire(12) == slots[0]
    with pytest.raises(StaleDescriptorError):
        memory.check(both, np.array([11, 12]))
    memory.close()


def body(*regions: RegionEntry, **changes: Any) -> bytes:
    vm = _body.VmAccess(_body.ProcessIdentity("boot", "pid:[1]", 1, 1), 4096, 8, b"name")
    whole = _body.Body(bytes(16), bytes(32), vm, "127.0.0.1:1", regions)
    return _body.encode(msgspec.structs.replace(whole, **changes))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        body(agent_id=b"short"),
        body(token=b""),
        body(address="no port"),
        body(address="[::1]:99999999"),
        body(RegionEntry(1, 0, 10, 3, 0), RegionEntry(1, 0, 10, 3, 0)),
        body(RegionEntry(1, 2**63 - 5, 10, 3, 0)),
        body(RegionEntry(1, 4096, 10, 3, 8)),
        msgspec.msgpack.encode([bytes(16), bytes(32), None, "", [[1, 4096, 0, 3, 0]]]),
        msgspec.msgpack.encode([bytes(16), bytes(32), None, "", [[1, 4096, 9, 4, 0]]]),
        msgspec.msgpack.encode([bytes(16), bytes(32), None, "", [[-1, 4096, 9, 3, 0]]]),
        bytes(17 * 1024 * 1024),
    ],
)
def test_malformed_metadata(data: bytes) -> None:
    with pytest.raises(MalformedMetadataError):
        _body.decode(data)


@given(st.binary(max_size=400), st.integers(0, 200))
def test_metadata_garbage_is_one_error(noise: bytes, at: int) -> None:
    good = body(RegionEntry(1, 4096, 10, 3, 0))
    for data in (noise, good[:at] + noise[:8] + good[at + 8 :], good[:at]):
        try:
            _body.decode(data)
        except MalformedMetadataError:
            continue


def test_bad_export_leaves_the_former_peer(make_agent: Callable[..., Agent]) -> None:
    one, two = make_agent(name="one"), make_agent(name="two")
    region = two.register(bytearray(b"abcd"), name="kv")
    peer = one.add_peer(two.metadata())
    with pytest.raises(MalformedMetadataError):
        one._backend.import_peer(peer.peer_id, b"junk")
    here = bytearray(4)
    local = one.register(here, name="mine")
    one.read(peer, [Pair.ranges(local, [0], peer.region("kv"), [0], [4])]).wait(5)
    assert here == b"abcd"
    assert region.nbytes == 4


def test_two_agents_of_one_process_reach_each_other(make_agent: Callable[..., Agent]) -> None:
    for path in ("vm", "tcp"):
        one, two = make_agent({"path": path}, "one"), make_agent({"path": path}, "two")
        two.register(bytearray(b"abcdefgh"), name="kv")
        here = bytearray(8)
        local = one.register(here, name="mine")
        peer = one.add_peer(two.metadata())
        ranges = [Pair.ranges(local, [2], peer.region("kv"), [3], [4])]
        one.read(peer, ranges).wait(5)
        assert here == b"\0\0defg\0\0"
        one.write(peer, ranges).wait(5)
