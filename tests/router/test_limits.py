"""Every field of a request is bounded, and a refusal says what to do."""

from __future__ import annotations

import http.client
import socket
import threading

import pytest

CHAT = "/v1/chat/completions"


def error(reply):
    return reply.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":NaN}',
        b'{"vllm_xargs":[]}',
    ],
)
def test_what_is_no_object_is_refused(cluster, body):
    reply = cluster.post(CHAT, body)
    assert reply.status == 400
    assert error(reply)["type"] == "BadRequestError"
    assert not any(engine.seen for engine in cluster.prefills)
    assert cluster.chat().status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "text"},
        {"messages": [1, 2]},
        {"messages": []},
        {"messages": [{"role": 5}]},
        {"messages": None},
        {"model": 7},
        {},
    ],
)
def test_what_only_the_engine_can_judge_is_left_to_it(cluster, fields):
    assert cluster.post(CHAT, fields).status == 200
    (body,) = [body for engine in cluster.decodes for body in engine.bodies]
    body.pop("kv_transfer_params")
    assert body == fields


def test_a_body_over_the_limit_is_refused(start):
    router = start.cluster(1, 1, "--limit", "max-body-bytes=1000")
    reply = router.chat("x" * 2000)
    assert reply.status == 413
    assert "--limit max-body-bytes" in error(reply)["message"]
    # Also when its length is not announced.
    connection = http.client.HTTPConnection(router.host, router.port, timeout=20)
    connection.request("POST", CHAT, iter([b"x" * 900, b"x" * 900]), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert router.chat().status == 200


def test_headers_over_the_limit_are_refused(start):
    router = start.cluster(1, 1, "--limit", "max-header-bytes=4096")
    assert router.chat(headers={"X-Conversation-ID": "x" * 4200}).status == 431
    assert router.chat(headers={"X-Conversation-ID": "x" * 9000}).status in {400, 431}
    assert router.chat().status == 200


def test_headers_that_never_end_are_refused(start):
    router = start.cluster(1, 1, "--limit", "max-header-bytes=4096")
    with socket.create_connection((router.host, router.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 8192)
        assert connection.recv(100).startswith(b"HTTP/1.1 4")


def test_a_body_that_never_ends_is_given_up(start):
    router = start.cluster(1, 1, "--limit", "request-timeout=0.3")
    with socket.create_connection((router.host, router.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_no_more_requests_at_once_than_allowed(start, eventually):
    router = start.cluster(1, 1, "--limit", "max-in-flight=2")
    router.decodes[0].behave(gate="before")
    threads = [threading.Thread(target=router.chat) for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(router.decodes[0].seen) == 2)
    reply = router.chat()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert "max-in-flight" in error(reply)["message"]
    assert router.get("/health").status == 200
    router.decodes[0].open_gate()
    for thread in threads:
        thread.join()
    assert router.chat().status == 200


def test_unknown_paths_and_methods_are_named(cluster):
    reply = cluster.get("/v1/nothing")
    assert reply.status == 404
    assert "/v1/nothing" in error(reply)["message"]
    assert cluster.get(CHAT).status == 405
    assert cluster.post("/health", {}).status == 405


def test_an_id_that_is_no_utf8_is_ignored(cluster):
    labels = {"source": "body:conversation_id", "reason": "type"}
    before = cluster.metric("kvt_router_ids_ignored_total", **labels)
    raw = b'{"model":"m","messages":[],"conversation_id":"\xff\xfe"}'
    cluster.post(CHAT, raw)
    assert cluster.metric("kvt_router_ids_ignored_total", **labels) == before + 1


def test_a_large_body_goes_through(cluster):
    text = "word " * 800_000
    assert cluster.chat(text).status == 200
    (body,) = [body for engine in cluster.decodes for body in engine.bodies]
    assert body["messages"][0]["content"] == text


def test_garbage_on_the_port_does_no_harm(cluster):
    for garbage in (b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"POST\r\n\r\n", b"\x16\x03\x01"):
        with socket.create_connection((cluster.host, cluster.port), timeout=20) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert cluster.chat().status == 200


def test_it_works_over_ipv6(start):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as reason:
        pytest.skip(f"no IPv6 loopback here: {reason}")
    engines = [start.engine(name, host="::1") for name in ("prefill-0", "decode-0")]
    router = start.router(engines[:1], engines[1:], host="::1")
    reply = router.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["x-kvt-decode"] == "decode-0"
    assert engines[0].seen[0]["headers"]["host"] == f"[::1]:{engines[0].port}"


def test_metrics_and_health_tell_the_truth(start):
    router = start.cluster(1, 1)
    router.chat()
    router.chat(stream=True)
    assert router.metric("kvt_router_requests_total", path=CHAT, outcome="ok") == 2
    assert router.metric("kvt_router_legs_total", leg="prefill", outcome="ok") == 2
    assert router.metric("kvt_router_added_latency_seconds_count") == 2
    assert router.metric("kvt_router_first_byte_seconds_count") == 2
    assert router.metric("kvt_router_engine_up") == 2
    assert router.metric("kvt_router_engine_in_flight") == 0
    router.decodes[0].kill()
    router.wait_state("decode-0", "down")
    assert router.metric("kvt_router_engine_up", engine="decode-0") == 0
    assert router.get("/health").json() == {
        "status": "unavailable",
        "prefill": {"prefill-0": "up"},
        "decode": {"decode-0": "down"},
    }


def test_a_healthy_run_logs_no_warning(start):
    router = start.cluster(2, 2)
    for number in range(10):
        router.chat(f"{number}", stream=bool(number % 2))
    assert "WARNING" not in router.read_log()
    assert "ERROR" not in router.read_log()


def test_a_signal_ends_it_after_the_requests_under_way(start, eventually):
    router = start.cluster(1, 1)
    router.decodes[0].behave(gate="before")
    replies = []
    thread = threading.Thread(target=lambda: replies.append(router.chat()))
    thread.start()
    eventually(lambda: router.decodes[0].seen)
    router.process.terminate()
    eventually(lambda: "Shutting down" in router.read_log())
    router.decodes[0].open_gate()
    thread.join()
    assert replies[0].status == 200
    assert router.process.wait(20) in {0, -15}
