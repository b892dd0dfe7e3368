"""Bindings are bounded; a shared store only ever costs locality."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvtransport_vllm.router.affinity import Binding, MemoryStore

SHARED = {"KVT_ROUTER_SECRET": "0123456789abcdef-for-tests"}


def get(store, key):
    return asyncio.run(store.get([key]))[0]


def test_the_oldest_binding_goes_first():
    store = MemoryStore(entries=3, ttl_s=100)
    for number in range(5):
        store.put([b"%d" % number], Binding("d", "p", time.time()))
        store.put([b"0"], Binding("d", "p", time.time()))  # used again all the time
    assert len(store) == 3
    assert [get(store, b"%d" % n) is not None for n in range(5)] == [True, False, False, True, True]
    store.drop(b"0")
    assert get(store, b"0") is None


def test_bindings_expire():
    store = MemoryStore(entries=10, ttl_s=100)
    store.put([b"old"], Binding("d", "p", time.time() - 101))
    store.put([b"new"], Binding("d", "p", time.time() - 99))
    assert get(store, b"old") is None
    assert get(store, b"new") is not None
    assert len(store) == 1


MILLION = """
import random, resource, time
from kvtransport_vllm.router.affinity import Binding, MemoryStore
from kvtransport_vllm.router.identity import Keyring
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
ring, store = Keyring(bytes(16)), MemoryStore(entries=50_000, ttl_s=1000)
rng = random.Random(1)
def put(count):
    for _ in range(count):
        key = ring.conversation(b"t" * 16, "header:X", rng.randbytes(200))
        store.put([key], Binding("decode-0", "prefill-0", time.time()))
put(60_000)
before = peak()
put(1_000_000)
print(len(store), peak() - before)
"""


def test_a_million_random_ids_stay_within_bounds():
    result = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True, timeout=60
    )
    entries, grown_mib = result.stdout.split()
    assert int(entries) == 50_000
    assert float(grown_mib) < 16


def test_many_random_ids_over_http_stay_within_bounds(start):
    router = start.cluster(1, 1, "--affinity-entries", "50")
    for _ in range(120):
        name = random.Random(os.urandom(8)).randbytes(60).hex()
        assert router.chat(name, headers={"X-Conversation-ID": name}).status == 200
    assert router.metric("kvt_router_affinity_bindings") == 50


@pytest.fixture
def redis_server(tmp_path):
    """A real Redis on a free port: ``(url, stop, go)``."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server here (Debian: apt-get install redis-server)")
    pytest.importorskip("redis", reason="needs the redis client (extra: redis)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.02)
    yield port, process
    process.kill()
    process.wait(20)


@pytest.fixture
def stalled_store():
    """A server that accepts and never answers."""
    pytest.importorskip("redis", reason="needs the redis client (extra: redis)")
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def accept():
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in kept:
        connection.close()


def replicas(start, port, count=2):
    ps = [start.engine("prefill-0")]
    ds = [start.engine(f"decode-{i}") for i in range(3)]
    options = ("--redis-url", f"redis://127.0.0.1:{port}", "--redis-timeout", "1")
    return [start.router(ps, ds, *options, env=SHARED) for _ in range(count)]


def test_replicas_share_affinity(start, redis_server, eventually):
    port, _ = redis_server
    one, two = replicas(start, port)
    for number in range(4):
        conversation = {"X-Conversation-ID": f"c{number}"}
        home = one.chat(f"{number}", headers=conversation).headers["x-kvt-decode"]
        eventually(lambda c=conversation: knows(two, c))
        for turn in range(6):
            router = (one, two)[turn % 2]
            assert router.chat(f"{turn}", headers=conversation).headers["x-kvt-decode"] == home


def knows(router, conversation):
    """Its bindings reach the store a little after the answer."""
    hits = router.metric("kvt_router_affinity_total", result="hit")
    router.chat("?", headers=conversation)
    return router.metric("kvt_router_affinity_total", result="hit") > hits


def test_replicas_without_a_common_secret_are_warned_and_share_nothing(start, redis_server):
    port, _ = redis_server
    engines = [start.engine("p"), start.engine("d")]
    options = ("--redis-url", f"redis://127.0.0.1:{port}", "--redis-timeout", "1")
    one, two = (start.router(engines[:1], engines[1:], *options) for _ in range(2))
    assert "no router secret" in one.read_log()
    one.chat(headers={"X-Conversation-ID": "c"})
    time.sleep(0.2)
    two.chat(headers={"X-Conversation-ID": "c"})
    assert two.metric("kvt_router_affinity_total", result="hit") == 0


def test_nothing_of_an_id_or_a_token_is_in_the_store(start, redis_server, eventually):
    import redis

    port, _ = redis_server
    (router,) = replicas(start, port, 1)
    router.chat("a secret text", {"X-Conversation-ID": "my-id", "Authorization": "Bearer tok"})
    with redis.Redis(port=port) as client:
        keys = eventually(lambda: client.keys("*"))
        values = client.mget(keys)
        assert 0 < client.pttl(keys[0]) <= 960_000
    everything = b"".join([*keys, *values])
    assert not [word for word in (b"my-id", b"tok", b"secret text") if word in everything]


def test_garbage_in_the_store_is_a_miss(start, redis_server, eventually):
    import redis

    port, _ = redis_server
    one, two = replicas(start, port)
    for number, garbage in enumerate((b"", b"\xc1", b"x" * 5000, b"\x92\xc4\x08AAAAAAAA\x93")):
        conversation = {"X-Conversation-ID": f"c{number}"}
        one.chat(f"x{number}", headers=conversation)
        with redis.Redis(port=port) as client:
            for key in eventually(lambda: len(found := client.keys("*")) == 3 and found):
                client.set(key, garbage)
            assert two.chat(f"y{number}", headers=conversation).status == 200
            eventually(lambda: two.metric("kvt_router_affinity_bindings") > 0)
            client.flushall()
    assert two.metric("kvt_router_affinity_total", result="hit") == 0


def test_a_value_under_the_wrong_key_is_a_miss(start, redis_server, eventually):
    import redis

    port, _ = redis_server
    one, two = replicas(start, port)
    one.chat("x", headers={"X-Conversation-ID": "c"})
    with redis.Redis(port=port) as client:
        # The id, the response id and the content.
        keys = eventually(lambda: len(found := client.keys("*")) == 3 and found)
        first, *others = client.mget(keys)
        for key, value in zip(keys, [*others, first], strict=True):
            client.set(key, value)
    assert two.chat("y", headers={"X-Conversation-ID": "c"}).status == 200
    assert two.metric("kvt_router_affinity_total", result="hit") == 0


def test_a_store_that_dies_is_a_miss_and_comes_back(start, redis_server, eventually):
    port, process = redis_server
    one, two = replicas(start, port)
    one.chat("x", headers={"X-Conversation-ID": "c"})
    process.kill()
    process.wait(20)
    home = one.chat("y", headers={"X-Conversation-ID": "c"}).headers["x-kvt-decode"]
    for turn in range(5):
        # Its own memory still knows.
        assert (
            one.chat(f"{turn}", headers={"X-Conversation-ID": "c"}).headers["x-kvt-decode"] == home
        )
    assert two.chat("z", headers={"X-Conversation-ID": "c"}).status == 200
    assert one.metric("kvt_router_affinity_store_errors_total") > 0


def test_a_stalled_store_costs_one_short_wait(start, stalled_store):
    engines = [start.engine("p"), start.engine("d")]
    options = ("--redis-url", f"redis://127.0.0.1:{stalled_store}")
    router = start.router(engines[:1], engines[1:], *options, env=SHARED)
    for turn in range(20):
        assert router.chat(f"{turn}", headers={"X-Conversation-ID": "c"}).status == 200
    assert router.metric("kvt_router_affinity_store_errors_total", operation="get") > 0
    assert router.metric("kvt_router_affinity_total", result="hit") == 19
    # After the first failure it rests instead of making every request wait.
    assert router.read_log().count("affinity store") <= 4


def test_a_store_that_is_not_there_at_start_is_no_reason_to_fail(start):
    pytest.importorskip("redis", reason="needs the redis client (extra: redis)")
    engines = [start.engine("p"), start.engine("d")]
    router = start.router(engines[:1], engines[1:], "--redis-url", "redis://127.0.0.1:1")
    assert router.chat().status == 200
