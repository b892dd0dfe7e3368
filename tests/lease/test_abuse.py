"""Whatever reaches the control port, the next good client is served."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.lease_peer import chain

from kvtransport.errors import ProtocolError
from kvtransport.lease import protocol
from kvtransport.lease.control import ControlPlane
from kvtransport.lease.runs import decode_runs, encode_runs

Engine = Callable[..., ControlPlane]

VALID = protocol.encode(protocol.Lookup(1, "i", "r", chain(64).digests, 64, 16, 0, 1.0))
HELLO = protocol.encode(protocol.Hello(1, "e", "i", "tcp://127.0.0.1:1", {}, {}))


@pytest.fixture
def owner(engine: Engine) -> ControlPlane:
    return engine("owner", hold=64)


@pytest.fixture
def good_client(engine: Engine, owner: ControlPlane) -> Iterator[None]:
    """After the test: a new client is served, and so is one that was there before."""
    before = engine("before", peers={"o": owner.address})
    found(before)
    yield
    found(before)
    found(engine("after", peers={"o": owner.address}))


def found(control: ControlPlane) -> None:
    result = control.lookup(chain(64), deadline_s=20.0).wait(20.0)
    assert result is not None
    assert result.lease is not None, result.reason
    result.lease.release(delivered=False)


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(address)
        yield sock


def host_port(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


GARBAGE = {
    "empty": b"",
    "one byte": b"K",
    "magic only": b"KV",
    "header only": protocol.HEADER,
    "not ours": b"GET / HTTP/1.1\r\n\r\n",
    "random": os.urandom(5000),
    "header, then random": protocol.HEADER + os.urandom(500),
    "truncated": VALID[:-10],
    "trailing": VALID + b"\0",
    "unknown type": protocol.HEADER + msgspec.msgpack.encode(["reboot", 1]),
    "no type": protocol.HEADER + msgspec.msgpack.encode([1, 2, 3]),
    "a number": protocol.HEADER + msgspec.msgpack.encode(7),
    "wrong field types": protocol.HEADER + msgspec.msgpack.encode(["lookup", *"abcdefgh"]),
    "negative count": protocol.HEADER
    + msgspec.msgpack.encode(["lookup", 1, "i", "r", b"", -1, 16, 0, 1.0]),
    "huge count": protocol.HEADER
    + msgspec.msgpack.encode(["lookup", 1, "i", "r", b"", 2**40, 16, 0, 1.0]),
    "tokens without digests": protocol.HEADER
    + msgspec.msgpack.encode(["lookup", 1, "i", "r", b"", 2**30, 16, 0, 1.0]),
    "no group size": protocol.HEADER
    + msgspec.msgpack.encode(["lookup", 1, "i", "r", b"", 0, 0, 0, 1.0]),
    "endless lease": protocol.HEADER + msgspec.msgpack.encode(["renew", 1, "i", 1, float("inf")]),
    "not a number": protocol.HEADER + msgspec.msgpack.encode(["renew", 1, "i", 1, float("nan")]),
    "deep nesting": protocol.HEADER + b"\x91" * 100_000,
    "promised length": protocol.HEADER + b"\xdd\xff\xff\xff\xff",
    "not utf-8": protocol.HEADER + b"\x93\xa7release\xa2\xff\xfe\x01\xc3",
    "long name": protocol.HEADER + msgspec.msgpack.encode(["release", "i" * 100_000, 1, True]),
    "another version": b"KV\x63\x00" + msgspec.msgpack.encode(["hello"]),
    "an answer": protocol.encode(protocol.RenewReply(1, 1, live=True)),
}


@pytest.mark.usefixtures("good_client")
def test_garbage_over_zmq(owner: ControlPlane) -> None:
    with dealer(owner.address) as sock:
        for frame in GARBAGE.values():
            sock.send(frame)
        for frames in ([b"", VALID], [VALID, VALID], [b"a"] * 300):
            sock.send_multipart(frames)
        sock.send(HELLO)
        sock.rcvtimeo = 20_000
        # The other version gets an answer that it can understand, then comes ours.
        answer = protocol.decode_to_reader(sock.recv())
        assert isinstance(answer, protocol.Error)
        assert answer.code == "protocol_version"
        assert isinstance(protocol.decode_to_reader(sock.recv()), protocol.HelloReply)
    counters = owner.status()["server"]
    assert counters["dropped.malformed"] == len(GARBAGE) - 1
    assert counters["dropped.frames"] == 3


@pytest.mark.parametrize("name", sorted(set(GARBAGE) - {"another version"}))
def test_every_kind_of_garbage_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_to_owner(GARBAGE[name])


@pytest.mark.usefixtures("good_client")
def test_garbage_over_plain_tcp(owner: ControlPlane) -> None:
    for payload in (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000), b"\xff" * 64):
        sock = socket.create_connection(host_port(owner.address), 5.0)
        with sock, contextlib.suppress(OSError):
            sock.sendall(payload)


@pytest.mark.usefixtures("good_client")
def test_oversized_message_ends_only_its_own_connection(owner: ControlPlane) -> None:
    with dealer(owner.address) as sock:
        sock.send(b"x" * (owner.settings.max_message_bytes + 1))
        sock.send(HELLO)
        sock.rcvtimeo = 300
        with contextlib.suppress(zmq.Again):
            sock.recv()
    assert owner.status()["server"].get("dropped.malformed", 0) == 0


@pytest.mark.usefixtures("good_client")
def test_port_scan(owner: ControlPlane) -> None:
    for _ in range(200):
        socket.create_connection(host_port(owner.address), 5.0).close()


@pytest.mark.usefixtures("good_client")
def test_slow_loris(owner: ControlPlane) -> None:
    with contextlib.ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(host_port(owner.address), 5.0))
            for _ in range(50)
        ]
        for sock in socks:
            sock.sendall(b"\xff")
        found_during = owner.lookup(chain(1), deadline_s=0.0)
        assert found_during.poll() is not None
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(struct.pack(">Q", 1))


@pytest.mark.usefixtures("good_client")
def test_flood(engine: Engine, owner: ControlPlane) -> None:
    """While one client floods, another one is served before its deadline."""
    quiet = engine("quiet", peers={"o": owner.address})
    found(quiet)
    with dealer(owner.address) as sock:
        sock.sndhwm = 0
        for _ in range(20_000):
            with contextlib.suppress(zmq.Again):
                sock.send(VALID, zmq.NOBLOCK)
        found(quiet)


def test_flooding_client_is_limited(engine: Engine) -> None:
    owner = engine("owner", hold=64, rate_per_s=100.0)
    with dealer(owner.address) as sock:
        for _ in range(2000):
            sock.send(HELLO)
        end = time.monotonic() + 10.0
        while owner.status()["server"].get("dropped.rate", 0) < 1000:
            assert time.monotonic() < end
            time.sleep(0.01)
    found(engine("reader", peers={"o": owner.address}))


@pytest.mark.usefixtures("good_client")
def test_client_that_never_reads(owner: ControlPlane) -> None:
    """Answers to a deaf client are dropped; nobody waits for it."""
    with dealer(owner.address) as sock:
        sock.rcvhwm = 1
        for _ in range(5000):
            with contextlib.suppress(zmq.Again):
                sock.send(HELLO, zmq.NOBLOCK)


@given(st.binary(max_size=300))
def test_decoding_random_bytes(data: bytes) -> None:
    for decode in (protocol.decode_to_owner, protocol.decode_to_reader):
        for frame in (data, protocol.HEADER + data):
            with contextlib.suppress(ProtocolError):
                decode(frame)


@given(st.data())
def test_decoding_damaged_messages(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from([VALID, HELLO])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        protocol.decode_to_owner(bytes(frame))


@given(st.lists(st.integers(0, 40), max_size=60))
def test_runs_round_trip(ids: list[int]) -> None:
    row = np.array(ids, dtype=np.int32)
    assert decode_runs(encode_runs(row), max_blocks=100).tolist() == ids


def test_consecutive_blocks_are_one_run() -> None:
    assert len(encode_runs(np.arange(5, 5000, dtype=np.int32))) == 8


@pytest.mark.parametrize(
    "coded",
    [
        b"1234567",
        struct.pack("<ii", -1, 1),
        struct.pack("<ii", 0, 0),
        struct.pack("<ii", 0, -5),
        struct.pack("<ii", 0, 101),
        struct.pack("<ii", 2**31 - 1, 2),
        struct.pack("<ii", 0, 60) * 2,
    ],
)
def test_bad_runs_are_refused_before_allocation(coded: bytes) -> None:
    with pytest.raises(ProtocolError, match="block runs"):
        decode_runs(coded, max_blocks=100)
