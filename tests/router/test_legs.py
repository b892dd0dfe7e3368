"""What the two legs carry, and what never reaches an engine."""

from __future__ import annotations

import json

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def seen(engines, conversation="", path=CHAT):
    """The one request that these engines saw."""
    requests = [r for engine in engines for r in engine.seen if r["path"] == path]
    assert len(requests) == 1, requests
    return requests[0]


def test_prefill_leg_asks_for_one_unstreamed_token_and_its_kv(cluster):
    reply = cluster.chat(
        stream=True,
        stream_options={"include_usage": True},
        n=3,
        max_tokens=77,
        max_completion_tokens=99,
        min_tokens=5,
        logprobs=True,
        top_logprobs=2,
        temperature=0.5,
    )
    assert reply.status == 200
    body = seen(cluster.prefills)["body"]
    params = body.pop("kv_transfer_params")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": False,
        "n": 1,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.5,
    }
    assert (
        params.items()
        >= {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }.items()
    )


def test_decode_leg_is_the_clients_request_plus_what_prefill_returned(cluster):
    fields = {"stream": True, "n": 2, "max_tokens": 77, "min_tokens": 5, "logprobs": True}
    reply = cluster.chat("what", **fields)
    body = seen(cluster.decodes)["body"]
    params = body.pop("kv_transfer_params")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "what"}],
        **fields,
    }
    assert params["do_remote_prefill"] is True
    assert params["remote_engine_id"] in {"prefill-0", "prefill-1"}
    assert params["remote_request_id"] == "chatcmpl-" + reply.headers["x-request-id"]


def test_completions_get_no_chat_fields(cluster):
    reply = cluster.post(TEXT, {"model": "m", "prompt": "once", "max_tokens": 9})
    assert reply.json()["id"] == "cmpl-" + reply.headers["x-request-id"]
    body = seen(cluster.prefills, path=TEXT)["body"]
    assert body["max_tokens"] == 1
    assert "max_completion_tokens" not in body


def test_numbers_and_text_go_through_byte_for_byte(cluster):
    raw = b'{"model":"m","temperature":0.10000000000000000001,"seed":12345678901234567890,'
    raw += '"messages":[{"role":"user","content":"é\\u00e9\\ud83d\\ude00"}]}'.encode()
    assert cluster.post(CHAT, raw).status == 200
    for engines in (cluster.prefills, cluster.decodes):
        text = seen(engines)["text"]
        assert "0.10000000000000000001" in text
        assert "12345678901234567890" in text
        assert '"é\\u00e9\\ud83d\\ude00"' in text


@pytest.mark.parametrize(
    "hostile",
    [
        b'"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil","remote_port":1}',
        b'"kv_transfer_params":"evil"',
        b'"kv_transfer_params":null,"kv_transfer_params":{"remote_host":"evil"}',
        b'"\\u006bv_transfer_params":{"remote_host":"evil"}',
        b'"ec_transfer_params":{"remote_host":"evil"}',
        b'"vllm_xargs":{"kv_transfer_params":"evil","ec_transfer_params":"evil","fine":1}',
    ],
)
def test_no_field_of_a_request_chooses_an_address(cluster, hostile):
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],' + hostile + b"}"
    assert cluster.post(CHAT, raw).status == 200
    for engines in (cluster.prefills, cluster.decodes):
        request = seen(engines)
        assert "evil" not in request["text"]
        if b"fine" in hostile:
            assert request["body"]["vllm_xargs"] == {"fine": 1}


def test_no_header_of_a_request_chooses_an_address(cluster):
    hostile = {
        "x-prefiller-host-port": "evil:1",
        "x-prefiller-url": "http://evil",
        "x-kvt-anything": "evil",
        "forwarded": "host=evil",
    }
    assert cluster.chat(headers=hostile).status == 200
    for engines in (cluster.prefills, cluster.decodes):
        headers = seen(engines)["headers"]
        assert "evil" not in json.dumps(headers)


def test_redirects_are_not_followed(cluster):
    for engine in cluster.prefills:
        engine.behave(status=307, location=cluster.decodes[0].url + CHAT)
    reply = cluster.chat()
    assert reply.status == 200
    assert "kv_transfer_params" not in seen(cluster.decodes)["body"]


def test_engines_get_the_headers_they_need(cluster):
    sent = {
        "Authorization": "Bearer token",
        "traceparent": "00-1-2-03",
        "X-Request-Id": "my.request-1",
        "X-data-parallel-rank": "3",
    }
    reply = cluster.chat(headers=sent)
    assert reply.headers["x-request-id"] == "my.request-1"
    for engines in (cluster.prefills, cluster.decodes):
        headers = seen(engines)["headers"]
        assert headers["authorization"] == "Bearer token"
        assert headers["traceparent"] == "00-1-2-03"
        assert headers["x-request-id"] == "my.request-1"
        assert headers["x-data-parallel-rank"] == "3"
        assert headers["content-type"] == "application/json"


@pytest.mark.parametrize("rank", ["-1", "1e3", "123456", "x"])
def test_a_malformed_dp_rank_is_refused(cluster, rank):
    reply = cluster.chat(headers={"X-data-parallel-rank": rank})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "x-data-parallel-rank"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ünï"])
def test_an_odd_request_id_is_replaced(cluster, given):
    reply = cluster.chat(headers={"X-Request-Id": given.encode("latin-1", "replace")})
    assert len(reply.headers["x-request-id"]) == 32


def test_prefill_report_is_a_header_also_on_streams(cluster):
    for engine in cluster.prefills:
        engine.behave(turn={"pulled": 12, "why": "two\nlines"})
    for stream in (False, True):
        reply = cluster.chat(stream=stream)
        assert json.loads(reply.headers["x-kvt-prefill"]) == {"pulled": 12, "why": "two\nlines"}
        assert reply.headers["x-kvt-decode"] in {"decode-0", "decode-1"}


def test_a_report_too_large_for_a_header_is_left_out(cluster):
    for engine in cluster.prefills:
        engine.behave(turn={"pulled": "x" * 5000})
    reply = cluster.chat()
    assert reply.status == 200
    assert "x-kvt-prefill" not in reply.headers


def test_prefill_without_parameters_still_gives_an_answer(cluster):
    for engine in cluster.prefills:
        engine.behave(no_params=True)
    assert cluster.chat().status == 200
    assert "kv_transfer_params" not in seen(cluster.decodes)["body"]


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 2}, {"use_beam_search": True}],
)
def test_what_needs_the_whole_prompt_on_one_engine_skips_prefill(cluster, fields):
    assert cluster.post(TEXT, {"model": "m", "prompt": "x", **fields}).status == 200
    assert not any(engine.seen for engine in cluster.prefills)
    assert "kv_transfer_params" not in seen(cluster.decodes, path=TEXT)["body"]


def test_reuse_can_be_turned_off_where_that_is_allowed(cluster):
    cluster.chat(headers={"x-kvt-reuse": "off"})
    assert seen(cluster.prefills)["body"]["kv_transfer_params"]["kvt_reuse"] is False
    assert cluster.chat(headers={"x-kvt-reuse": "maybe"}).status == 400


def test_reuse_override_is_refused_where_it_is_not_allowed(start):
    router = start.cluster(1, 1)
    reply = router.chat(headers={"x-kvt-reuse": "off"})
    assert reply.status == 400
    assert "--allow-reuse-override" in reply.json()["error"]["message"]
    router.chat()
    assert "kvt_reuse" not in router.prefills[0].bodies[-1]["kv_transfer_params"]


def test_dp_rank_of_an_engine_entry_wins(start):
    prefill, decode = start.engine("p"), start.engine("d")
    ranked = type("Ranked", (), {"name": "d-r2", "url": decode.url + "#dp-rank=2"})
    router = start.router([prefill], [ranked])
    assert router.chat(headers={"X-data-parallel-rank": "7"}).status == 200
    assert decode.seen[-1]["headers"]["x-data-parallel-rank"] == "2"
    assert prefill.seen[-1]["headers"]["x-data-parallel-rank"] == "7"


def test_models_are_the_engines(cluster):
    assert cluster.get("/v1/models").json()["data"][0]["id"] == "m"


@pytest.mark.parametrize("leg", ["prefills", "decodes"])
def test_a_refusal_is_relayed_as_it_is(cluster, leg):
    told = {"error": {"message": "no such template", "code": 422, "odd": [1]}}
    for engine in getattr(cluster, leg):
        engine.behave(status=422, body=told)
    reply = cluster.chat(stream=True)
    assert (reply.status, reply.json()) == (422, told)
    if leg == "prefills":
        assert not any(engine.seen for engine in cluster.decodes)
    else:
        assert sum(len(engine.seen) for engine in cluster.decodes) == 1


def test_the_openai_client_works_unchanged(cluster):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=cluster.url + "/v1", api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": "x"}]
        whole = client.chat.completions.create(model="m", messages=messages)
        assert whole.choices[0].message.content.startswith("from decode-")
        with client.chat.completions.create(model="m", messages=messages, stream=True) as parts:
            text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text.startswith("from decode-")
        for engine in cluster.decodes:
            engine.behave(status=400, body={"error": {"message": "bad temperature"}})
        with pytest.raises(openai.BadRequestError, match="bad temperature"):
            client.chat.completions.create(model="m", messages=messages)
        assert client.models.list().data[0].id == "m"
