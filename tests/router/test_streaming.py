"""Bytes go through as they come, and a broken answer never looks whole."""

from __future__ import annotations

import http.client
import json

import pytest

EVENT = 'data: {"choices":[{"text":"é"}]}\n\n'
DONE = "data: [DONE]\n\n"


def holder(cluster, reply):
    return next(e for e in cluster.decodes if e.name == reply.headers["x-kvt-decode"])


def test_the_first_byte_is_there_before_the_stream_ends(cluster):
    for engine in cluster.decodes:
        engine.behave(gate="after_first", chunks=[EVENT, DONE])
    reply = cluster.open_chat()
    pieces = reply.pieces()
    assert next(pieces) == EVENT.encode("latin-1")
    engine = holder(cluster, reply)
    assert engine.seen[-1]["end"] == "open"
    engine.open_gate()
    assert b"".join(pieces) == DONE.encode()
    reply.close()


def until_cut(reply):
    """The body of an answer that must end without its end-of-body mark."""
    received = b""
    try:
        for piece in reply.pieces():
            received += piece
    except http.client.IncompleteRead:
        return received
    finally:
        reply.close()
    raise AssertionError(f"the answer looks whole: {received}")


@pytest.mark.parametrize(
    "chunks",
    [
        ["d", "ata: {", '"a":"', "\xc3", "\xa9", '"}\n', "\ndata: [DO", "NE]", "\n\n"],
        [EVENT + EVENT + DONE],
        [EVENT * 2000, DONE],
        [": comment\n\n", EVENT, "data: [DONE]\r\n\r\n"],
    ],
)
def test_chunk_boundaries_change_nothing(cluster, chunks):
    for engine in cluster.decodes:
        engine.behave(chunks=chunks)
    reply = cluster.chat(stream=True)
    assert reply.status == 200
    assert reply.body == "".join(chunks).encode("latin-1")


@pytest.mark.parametrize("gate", ["after_first", "after_headers", "before"])
def test_a_client_that_leaves_ends_the_decode_leg(cluster, eventually, gate):
    for engine in cluster.decodes:
        engine.behave(gate=gate, chunks=[EVENT, DONE])
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    connection = http.client.HTTPConnection(cluster.host, cluster.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    (request,) = eventually(lambda: [r for e in cluster.decodes for r in e.seen])
    assert request["end"] == "open"
    if gate == "after_first":
        connection.getresponse().read1()
    connection.close()
    eventually(lambda: [r for e in cluster.decodes for r in e.seen if r["end"] == "gone"])
    eventually(lambda: cluster.metric("kvt_router_in_flight") == 0)


def test_a_client_that_leaves_during_prefill_never_reaches_decode(cluster, eventually):
    for engine in cluster.prefills:
        engine.behave(gate="before")
    connection = http.client.HTTPConnection(cluster.host, cluster.port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps({"model": "m", "prompt": "x"}))
    eventually(lambda: any(e.seen for e in cluster.prefills))
    connection.close()
    eventually(lambda: [r for e in cluster.prefills for r in e.seen if r["end"] == "gone"])
    eventually(lambda: cluster.metric("kvt_router_in_flight") == 0)
    assert not any(engine.seen for engine in cluster.decodes)


@pytest.mark.parametrize("place", ["before", "after_headers"])
def test_a_decode_that_dies_before_its_first_byte_is_replaced_unseen(start, place):
    router = start.cluster(1, 2)
    first = router.chat(headers={"X-Conversation-ID": "c"}).headers["x-kvt-decode"]
    victim = next(e for e in router.decodes if e.name == first)
    victim.behave(die=place)
    reply = router.chat(headers={"X-Conversation-ID": "c"}, stream=True)
    assert reply.status == 200
    assert reply.headers["x-kvt-decode"] != first
    assert reply.body.endswith(DONE.encode())
    assert router.metric("kvt_router_failovers_total", leg="decode") == 1
    # The affinity went with it.
    again = router.chat(headers={"X-Conversation-ID": "c"})
    assert again.headers["x-kvt-decode"] != first


def test_a_decode_that_dies_later_gives_an_error_event_and_a_cut_stream(start):
    router = start.cluster(1, 1)
    router.decodes[0].behave(die="after_first", chunks=[EVENT, DONE])
    reply = router.open_chat()
    received = until_cut(reply)
    assert received.startswith(EVENT.encode("latin-1"))
    last = received.decode("latin-1").strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 502
    assert DONE.encode() not in received
    assert router.metric("kvt_router_requests_total", outcome="aborted") == 1


def test_a_decode_that_dies_in_the_middle_of_an_event_ends_that_event(start):
    router = start.cluster(1, 1)
    router.decodes[0].behave(die="after_first", chunks=['data: {"cho', DONE])
    reply = router.open_chat()
    received = until_cut(reply)
    assert received.startswith(b'data: {"cho\n\ndata: {"error"')


def test_the_openai_client_raises_when_decode_dies_in_the_middle(start):
    openai = pytest.importorskip("openai")
    router = start.cluster(1, 1)
    router.decodes[0].behave(die="after_first", chunks=[EVENT.replace("é", "e"), DONE])
    with openai.OpenAI(base_url=router.url + "/v1", api_key="k", max_retries=0) as client:
        stream = client.completions.create(model="m", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="failed during its answer"), stream:
            list(stream)


def test_a_stream_without_its_end_mark_is_not_passed_off_as_whole(cluster):
    for engine in cluster.decodes:
        engine.behave(chunks=[EVENT])
    reply = cluster.open_chat()
    received = until_cut(reply)
    assert received.startswith(EVENT.encode("latin-1") + b'data: {"error"')


@pytest.mark.parametrize("stream", [False, True])
def test_200_without_content_is_a_failure(cluster, stream):
    for engine in cluster.decodes:
        engine.behave(empty=True)
    reply = cluster.chat(stream=stream)
    assert reply.status == 502
    assert sum(len(engine.seen) for engine in cluster.decodes) == 2


def test_a_stream_that_begins_with_a_server_error_is_tried_elsewhere(cluster, new_id):
    event = 'data: {"error":{"message":"engine core died","code":500}}\n\n'
    conversation = {"X-Conversation-ID": new_id()}
    bound = holder(cluster, cluster.chat(headers=conversation))
    bound.behave(chunks=[event, DONE])
    reply = cluster.chat(headers=conversation, stream=True)
    assert reply.status == 200
    assert b"engine core died" not in reply.body
    for engine in cluster.decodes:
        engine.behave(chunks=[event, DONE])
    reply = cluster.chat(headers=conversation, stream=True)
    assert (reply.status, reply.json()["error"]["message"]) == (500, "engine core died")


def test_a_stream_that_begins_with_a_client_error_is_relayed(cluster):
    event = 'data: {"error":{"message":"too long","code":400}}\n\n'
    for engine in cluster.decodes:
        engine.behave(chunks=[event, DONE])
    reply = cluster.chat(stream=True)
    assert reply.body == (event + DONE).encode()
