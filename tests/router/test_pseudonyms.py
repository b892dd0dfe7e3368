"""What engines are told of a conversation: something its turns have in common, not its id."""

from __future__ import annotations

CHAT = "/v1/chat/completions"


def named(router):
    """What the prefill engine was told, request by request."""
    (engine,) = router.prefills
    return [body["kv_transfer_params"].get("kvt_conversation") for body in engine.bodies]


def messages(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def post(router, texts, headers=None):
    reply = router.post(CHAT, {"model": "m", "messages": messages(*texts)}, headers)
    assert reply.status == 200


def test_turns_of_one_id_have_one_pseudonym_whatever_they_say(start):
    router = start.cluster(1, 1)
    for tenant, conversation in (("a", "one"), ("a", "one"), ("a", "two"), ("b", "one")):
        headers = {"Authorization": f"Bearer {tenant}", "X-Conversation-ID": conversation}
        router.chat(conversation + tenant, headers)
    first, again, other, others = named(router)
    assert first == again
    assert len({first, other, others}) == 3
    assert len(first) == 32
    assert set(first) <= set("0123456789abcdef")


def test_a_chat_without_an_id_is_known_by_its_beginning(start):
    router = start.cluster(1, 1)
    post(router, ["hello"])
    post(router, ["hello", "yes?", "and then"])
    post(router, ["another"])
    first, again, other = named(router)
    assert first == again != other
    assert first is not None


def test_a_raw_prompt_without_an_id_has_none(start):
    router = start.cluster(1, 1)
    router.post("/v1/completions", {"model": "m", "prompt": "x" * 300})
    assert named(router) == [None]


def test_restarted_router_with_its_secret_says_the_same(start):
    secret = {"KVT_ROUTER_SECRET": "0123456789abcdef-for-tests"}
    prefill, decode = start.engine("p"), start.engine("d")
    for env in (secret, secret, {}):
        router = start.router([prefill], [decode], env=env)
        router.chat(headers={"X-Conversation-ID": "one"})
    first, again, unkeyed = named(router)
    assert first == again != unkeyed
