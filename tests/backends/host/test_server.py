"""Strangers on the serving port, and invited callers that misbehave."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.host_pair import Pair

from kvtransport.agent import Agent
from kvtransport.errors import HandshakeTimeoutError, PeerLostError
from kvtransport.layout.blocks import Pair as Descriptors
from kvtransport_backends.host import _body
from kvtransport_backends.host._handshake import Credentials, call
from kvtransport_backends.host._wire import DESCRIPTOR, HEAD_BYTES, Head, Request

MIB = 1 << 20


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    pair = make_pair(
        {"path": "tcp"},
        {"path": "tcp", "handshake_timeout_s": 1.0, "stall_timeout_s": 1.0, "max_connections": 4},
    )
    pair.remote.call("register", name="kv", nbytes=MIB, seed=1)
    pair.memory("mine", MIB)
    pair.connect()
    return pair


def body_of(pair: Pair) -> _body.Body:
    lane = pair.backend._peers[pair.peer.peer_id].lane
    body: _body.Body = lane._body
    return body


def dial(pair: Pair) -> socket.socket:
    host, port = body_of(pair).address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 5)


def check_good_client(pair: Pair) -> None:
    """Both the connection that exists and a new one are served."""
    ranges = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("kv"), [0], [MIB])
    pair.agent.read(pair.peer, [ranges]).wait(20)
    invited(pair).close()


def invited(pair: Pair) -> socket.socket:
    """A raw connection that has proved the token."""
    sock = dial(pair)
    body = body_of(pair)
    call(sock, Credentials(os.urandom(16), os.urandom(32)), body.token, 5)
    return sock


def ended(sock: socket.socket) -> bool:
    """Whether the other side hangs up within a few seconds."""
    sock.settimeout(5)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n" * 20, os.urandom(104), os.urandom(100_000)]
)
def test_garbage_from_a_stranger(pair: Pair, garbage: bytes) -> None:
    for _ in range(10):
        with dial(pair) as sock:
            sock.sendall(garbage)
            if len(garbage) >= 104:
                assert ended(sock)
    check_good_client(pair)


def test_wrong_token(pair: Pair) -> None:
    with dial(pair) as sock, pytest.raises(PeerLostError):
        call(sock, Credentials(os.urandom(16), os.urandom(32)), os.urandom(32), 5)
    check_good_client(pair)


def test_a_recorded_proof_is_worthless(pair: Pair) -> None:
    """Each connection has a fresh challenge."""
    sent: list[bytes] = []
    with dial(pair) as sock:
        recorder = Recorder(sock, sent)
        call(recorder, Credentials(bytes(16), bytes(32)), body_of(pair).token, 5)
    with dial(pair) as sock:
        sock.sendall(sent[0])
        assert ended(sock)


class Recorder:
    def __init__(self, sock: socket.socket, sent: list[bytes]) -> None:
        self._sock = sock
        self._sent = sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


def test_silent_strangers_are_dropped_after_their_deadline(pair: Pair) -> None:
    socks = [dial(pair) for _ in range(8)]
    assert all(ended(sock) for sock in socks)
    for sock in socks:
        sock.close()
    check_good_client(pair)


def test_flood_of_connections(pair: Pair) -> None:
    socks = []
    try:
        for index in range(300):
            socks.append(dial(pair))
            if index % 100 == 50:
                check_good_client(pair)
        check_good_client(pair)
    finally:
        for sock in socks:
            sock.close()
    check_good_client(pair)


def test_more_invited_callers_than_allowed(pair: Pair) -> None:
    held = [invited(pair) for _ in range(3)]  # the pair's own connection is the fourth
    with dial(pair) as sock:
        call(sock, Credentials(os.urandom(16), os.urandom(32)), body_of(pair).token, 5)
        assert ended(sock)
    assert pair.remote.call("counters")["connections_refused"] == 1
    for sock in held:
        sock.close()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with invited(pair) as sock:
            sock.settimeout(0.3)
            try:
                if sock.recv(1) == b"":
                    continue
            except TimeoutError:
                break
    else:
        raise AssertionError("a free place was never given again")


def rows(*wanted: tuple[int, int, int]) -> bytes:
    table = np.zeros(len(wanted), DESCRIPTOR)
    for index, (region, offset, nbytes) in enumerate(wanted):
        table[index] = (region, offset, nbytes, 0)
    return table.tobytes()


BAD_REQUESTS = {
    "noise": os.urandom(HEAD_BYTES),
    "unknown request": struct.pack("<4sB3xIQ", b"KVh1", 99, 1, 8),
    "too many descriptors": Head(Request.READ, 1 << 30, 8).encode(),
    "too many bytes": Head(Request.READ, 1, 1 << 60).encode() + rows((0, 0, 1 << 60)),
    "no descriptors": Head(Request.READ, 0, 0).encode(),
    "long notification": Head(Request.NOTIFY, 0, 1 << 30).encode(),
    "lengths differ": Head(Request.READ, 1, 8).encode() + rows((0, 0, 9)),
    "lengths wrap": Head(Request.READ, 3, 8).encode()
    + rows((0, 0, 2**63), (0, 0, 2**63), (0, 0, 8)),
    "half a head": Head(Request.READ, 1, 8).encode()[:5],
    "half a write": Head(Request.WRITE, 1, 4096).encode() + rows((0, 0, 4096)) + b"x" * 100,
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_of_an_invited_caller(pair: Pair, name: str) -> None:
    """The connection ends, at the latest after the stall timeout; others go on."""
    with invited(pair) as sock:
        sock.sendall(BAD_REQUESTS[name])
        assert ended(sock)
    check_good_client(pair)


def test_pull_over_tcp_is_refused(pair: Pair) -> None:
    """Only the kernel's word says whose memory a WRITE may be fetched from."""
    kv = pair.peer.region("kv").region_id
    before = pair.remote.call("digest", name="kv")
    with invited(pair) as sock:
        sock.sendall(Head(Request.PULL, 1, 64).encode() + rows((kv, 0, 64)))
        assert sock.recv(1) == b"\5"
    assert pair.remote.call("digest", name="kv") == before


def test_refused_write_keeps_the_connection_in_step(pair: Pair) -> None:
    kv = pair.peer.region("kv").region_id
    with invited(pair) as sock:
        for region, offset, answer in ((kv + 1, 0, 1), (kv, MIB, 2), (kv, 0, 0)):
            head = Head(Request.WRITE, 1, 300_000).encode()
            sock.sendall(head + rows((region, offset, 300_000)) + bytes([3]) * 300_000)
            assert sock.recv(1) == bytes([answer])
    stored = bytes([3]) * 300_000
    found = pair.remote.call("digest", name="kv", start=0, stop=300_000)
    assert found == hashlib.sha256(stored).hexdigest()


@pytest.fixture
def mute_address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_mute_listener_is_bounded(make_agent: Callable[..., Agent], mute_address: str) -> None:
    agent = make_agent({"path": "tcp", "handshake_timeout_s": 0.3})
    body = _body.Body(bytes(16), bytes(32), None, mute_address, ())
    started = time.monotonic()
    with pytest.raises(HandshakeTimeoutError):
        agent._backend.import_peer(1, _body.encode(body))
    assert time.monotonic() - started < 10
    assert not agent._backend._peers


@pytest.mark.parametrize(
    ("greeting", "answer", "text"),
    [
        (b"220 mail.example.org ESMTP ready and waiting\r\n", b"", "no host agent"),
        (b"KVTHOST1" + bytes(16), bytes(32), "another agent answers"),
    ],
)
def test_listener_that_is_not_our_peer(
    make_agent: Callable[..., Agent], greeting: bytes, answer: bytes, text: str
) -> None:
    """It accepts whatever we prove, but cannot prove the token itself."""

    def pretend(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(greeting)
            if answer:
                sock.recv(4096)
                sock.sendall(answer)
                sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = make_agent({"path": "tcp", "handshake_timeout_s": 2.0})
        address = f"127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(PeerLostError, match=text):
            agent._backend.import_peer(
                1, _body.encode(_body.Body(bytes(16), bytes(32), None, address, ()))
            )
        thread.join(5)


def test_secrets_are_not_logged(
    make_pair: Callable[..., Pair], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pair = make_pair({"path": path})
    pair.remote.call("register", name="kv", nbytes=MIB)
    pair.memory("mine", MIB)
    pair.connect()
    ranges = Descriptors.ranges(pair.local["mine"], [0], pair.peer.region("kv"), [0], [MIB])
    pair.agent.write(pair.peer, [ranges]).wait(20)
    body, own = body_of(pair), pair.backend._server.own
    shown = caplog.text + repr(body) + repr(own) + repr(pair.backend._shared)
    for secret in (body.token, own.token):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown
