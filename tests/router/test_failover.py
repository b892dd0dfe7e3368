"""Engines that refuse, hang, die and come back."""

from __future__ import annotations

import concurrent.futures
import http.client
import signal
import socket
import threading
import time

import pytest
from support import stopping

from kvtransport_vllm.router.config import EngineSpec
from kvtransport_vllm.router.engines import Engine, State
from kvtransport_vllm.router.errors import (
    EngineDeadlineError,
    EngineFaultError,
    EngineLostError,
    EngineSilentError,
    EngineUnreachableError,
)
from kvtransport_vllm.router.legs import judged
from kvtransport_vllm.router.metrics import Metrics

CONVERSATION = {"X-Conversation-ID": "c"}


def test_a_failing_prefill_is_replaced_by_another(cluster):
    cluster.prefills[0].behave(status=503)
    cluster.prefills[1].behave(status=500)
    assert cluster.chat().status == 200
    assert [len(e.seen) for e in cluster.prefills] == [1, 1]
    cluster.prefills[1].reset()
    for _ in range(4):
        assert cluster.chat().status == 200
    assert all("kv_transfer_params" in body for e in cluster.decodes for body in e.bodies[1:])


@pytest.mark.parametrize("status", [408, 425, 429])
def test_a_busy_prefill_is_no_refusal(cluster, status):
    for engine in cluster.prefills:
        engine.behave(status=status)
    assert cluster.chat().status == 200


def test_without_any_prefill_decode_computes_the_prompt(start):
    router = start.cluster(1, 1)
    router.prefills[0].kill()
    assert router.chat().status == 200
    assert router.chat().status == 200
    assert all("kv_transfer_params" not in body for body in router.decodes[0].bodies)
    assert router.metric("kvt_router_prefill_skipped_total", reason="failed") == 1
    assert router.metric("kvt_router_prefill_skipped_total", reason="down") == 1
    assert router.get("/health").status == 200


def test_without_any_prefill_the_operator_may_want_an_error(start):
    router = start.cluster(1, 1, "--on-prefill-failure", "error")
    router.prefills[0].behave(status=500)
    assert router.chat().status == 502
    router.prefills[0].kill()
    router.wait_state("prefill-0", "down")
    reply = router.chat()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert router.get("/health").status == 503
    assert not router.decodes[0].seen


def test_a_failing_decode_is_replaced_and_the_last_error_relayed(cluster):
    cluster.decodes[0].behave(status=500)
    assert cluster.chat().headers["x-kvt-decode"] == "decode-1"
    told = {"error": {"message": "both broken"}}
    for engine in cluster.decodes:
        engine.behave(status=500, body=told)
    reply = cluster.chat()
    assert (reply.status, reply.json()) == (500, told)


def test_an_engine_that_fails_fast_does_not_attract_all_traffic(start):
    router = start.cluster(1, 2)
    router.decodes[0].behave(status=500)
    for number in range(20):
        assert router.chat(f"{number}").status == 200
    # Its probes succeed all the time; the failing legs keep it out.
    assert len(router.decodes[0].seen) < 6
    assert router.states()["decode-0"] == "suspect"
    router.decodes[0].reset()
    router.wait_state("decode-0", "up")


def test_a_dead_decode_is_dropped_at_once_without_a_burst(start):
    router = start.cluster(1, 2)
    first = router.chat(headers=CONVERSATION).headers["x-kvt-decode"]
    dead = next(e for e in router.decodes if e.name == first)
    dead.kill()
    # Somebody else listens on its port now and counts.
    connections = 0

    def count() -> None:
        nonlocal connections
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return
            connections += 1

    router.wait_state(first, "down")
    listener = socket.create_server((dead.host, dead.port))
    thread = threading.Thread(target=count)
    thread.start()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: router.chat(headers=CONVERSATION), range(64)))
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    assert {r.status for r in replies} == {200}
    assert first not in {r.headers["x-kvt-decode"] for r in replies}
    assert connections <= 5  # probes only, and those back off


def test_one_refused_connection_is_enough(start):
    router = start.cluster(1, 2, "--limit", "probe-interval=3600")
    victim = router.decodes[0]
    victim.kill()
    for number in range(10):
        assert router.chat(f"{number}").status == 200
    refused = router.metric("kvt_router_legs_total", engine=victim.name, outcome="unreachable")
    assert refused == 1
    assert router.states()[victim.name] == "down"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (EngineUnreachableError, State.DOWN),
        (EngineLostError, State.SUSPECT),
        (EngineSilentError, State.SUSPECT),
        (EngineDeadlineError, State.UP),
        (EngineFaultError, State.UP),
    ],
)
def test_a_failed_leg_changes_the_state_before_any_probe(error, state):
    engine = Engine(EngineSpec(name="d", url="http://h:1"), "decode")
    engine.probed()
    turn = type("Turn", (), {"id": "r"})
    with pytest.raises(error), judged(engine, turn, Metrics()):
        raise error("told to", engine="d")
    assert engine.state is state


def test_a_dead_engine_returns_when_healthy_and_keeps_nothing(start):
    router = start.cluster(1, 2)
    first = router.chat(headers=CONVERSATION).headers["x-kvt-decode"]
    dead = next(e for e in router.decodes if e.name == first)
    dead.kill()
    router.wait_state(first, "down")
    dead.start()
    router.wait_state(first, "up")
    # Its retained KV is gone, so the old binding must not pull the conversation back.
    router.chat(headers=CONVERSATION)
    assert router.metric("kvt_router_affinity_total", result="void") >= 1
    assert "kvt_ask" not in router.prefills[0].bodies[-1]["kv_transfer_params"]


def test_all_decodes_down_is_a_clear_error(start):
    router = start.cluster(1, 1)
    router.decodes[0].kill()
    assert router.chat().status in {502, 503}
    reply = router.chat()
    assert reply.status == 503
    assert reply.json()["error"]["message"] == "no decode engine is up; try again later"
    assert reply.headers["retry-after"] == "1"
    assert router.get("/health").status == 503
    assert router.get("/v1/models").status == 503
    # The second request did not cost the prefill engine anything.
    assert len(router.prefills[0].seen) == 1
    router.decodes[0].start()
    router.wait_state("decode-0", "up")
    assert router.chat().status == 200


def test_engines_may_start_after_the_router(start):
    engines = [start.engine("p"), start.engine("d")]
    for engine in engines:
        engine.kill()
    router = start.router(engines[:1], engines[1:])
    assert router.chat().status == 503
    for engine in engines:
        engine.start()
    router.wait_state("p", "up")
    router.wait_state("d", "up")
    assert router.chat().status == 200


def test_a_frozen_decode_gives_its_requests_back(start):
    router = start.cluster(1, 2, "--limit", "probe-timeout=0.2")
    first = router.chat(headers=CONVERSATION).headers["x-kvt-decode"]
    frozen = next(e for e in router.decodes if e.name == first)
    stopping.send(frozen.process.pid, signal.SIGSTOP)
    # Its own deadline is minutes away; the probes find out.
    reply = router.chat(headers=CONVERSATION)
    frozen.process.send_signal(signal.SIGCONT)
    assert reply.status == 200
    assert reply.headers["x-kvt-decode"] != first


def test_an_engine_that_shuts_down_may_finish_its_streams(start):
    router = start.cluster(1, 1)
    engine = router.decodes[0]
    engine.behave(gate="after_first")
    reply = router.open_chat()
    pieces = reply.pieces()
    received = next(pieces)
    control = http.client.HTTPConnection(engine.host, engine.port, timeout=20)
    control.request("POST", "/_drain")
    control.getresponse().read()
    router.wait_state(engine.name, "down")
    time.sleep(1)  # several more refused probes
    control.request("POST", "/_open")
    control.getresponse().read()
    control.close()
    received += b"".join(pieces)
    reply.close()
    assert received.endswith(b"data: [DONE]\n\n")


def test_a_slow_prefill_is_given_up_after_its_deadline(start):
    router = start.cluster(2, 1, "--limit", "prefill-timeout=0.3")
    for engine in router.prefills:
        engine.behave(gate="before")
    assert router.chat().status == 200
    assert router.metric("kvt_router_legs_total", leg="prefill", outcome="deadline") == 1
    # The same work again would take as long on the other one.
    assert sum(len(engine.seen) for engine in router.prefills) == 1


def test_a_slow_decode_is_given_up_after_its_deadline(start):
    router = start.cluster(1, 2, "--limit", "first-byte-timeout=0.3")
    for engine in router.decodes:
        engine.behave(gate="after_headers")
    reply = router.chat(stream=True)
    assert reply.status == 504
    assert "took too long" in reply.json()["error"]["message"]
    assert sum(len(engine.seen) for engine in router.decodes) == 1


def test_a_decode_that_pauses_too_long_in_its_answer_is_cut(start):
    router = start.cluster(1, 1, "--limit", "idle-timeout=0.3")
    router.decodes[0].behave(gate="after_first")
    reply = router.open_chat()
    received = b""
    with pytest.raises(http.client.IncompleteRead):  # noqa: PT012 - pieces before the cut
        for piece in reply.pieces():
            received += piece
    reply.close()
    assert b"(deadline)" in received


def test_an_engine_that_reports_itself_unhealthy_takes_no_traffic(cluster):
    cluster.decodes[0].behave(health=503)
    cluster.wait_state("decode-0", "down")
    for _ in range(4):
        assert cluster.chat().headers["x-kvt-decode"] == "decode-1"


def test_bodies_that_are_no_completion_count_as_a_failed_prefill(cluster):
    for engine in cluster.prefills:
        engine.behave(turn=1)
    reply = cluster.chat()
    assert reply.status == 200
    assert not any("kv_transfer_params" in body for e in cluster.decodes for body in e.bodies)
