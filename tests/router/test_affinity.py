"""A conversation comes back to the decode engine that holds its KV."""

from __future__ import annotations

import itertools

import pytest

_numbers = itertools.count()
SYSTEM = {"role": "system", "content": "You are brief. " * 40}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def chat(cluster, messages, headers=None, **fields):
    body = {"model": "m", "messages": messages, **fields}
    reply = cluster.post("/v1/chat/completions", body, headers)
    assert reply.status == 200, reply.body
    return reply.headers["x-kvt-decode"]


def complete(cluster, prompt, **fields):
    reply = cluster.post("/v1/completions", {"model": "m", "prompt": prompt, **fields})
    assert reply.status == 200, reply.body
    return reply.headers["x-kvt-decode"]


def disturb(cluster):
    """Another conversation in between, so that taking turns would show."""
    chat(cluster, [user(f"unrelated {next(_numbers)}")])


@pytest.mark.parametrize(
    "place",
    [
        ("header", "X-Conversation-ID"),
        ("header", "x-session-id"),
        ("body", "conversation_id"),
        ("body", "session_id"),
    ],
)
def test_an_id_keeps_its_engine(cluster, new_id, place):
    kind, name = place
    ids = {new_id(): set() for _ in range(4)}
    for turn, conversation in itertools.product(range(3), ids):
        if conversation == min(ids):
            disturb(cluster)  # an odd number of turns per round
        # Nothing but the id connects these turns.
        messages = [user(f"{conversation} {turn}")]
        if kind == "header":
            ids[conversation].add(chat(cluster, messages, {name: conversation}))
        else:
            ids[conversation].add(chat(cluster, messages, **{name: conversation}))
    assert all(len(engines) == 1 for engines in ids.values())
    assert set.union(*ids.values()) == {"decode-0", "decode-1"}


def test_a_number_is_an_id_too(cluster):
    first = chat(cluster, [user("a")], conversation_id=1234567)
    disturb(cluster)
    assert chat(cluster, [user("b")], conversation_id=1234567) == first


def test_previous_response_id_follows_the_response(cluster):
    reply = cluster.post("/v1/chat/completions", {"model": "m", "messages": [user("start")]}, None)
    for turn in range(3):
        disturb(cluster)
        following = cluster.post(
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [user(f"turn {turn}")],
                "previous_response_id": reply.json()["id"],
            },
        )
        assert following.headers["x-kvt-decode"] == reply.headers["x-kvt-decode"]
        reply = following


def test_chats_are_recognised_by_their_beginning(cluster, new_id):
    histories = [[SYSTEM, user(new_id())] for _ in range(4)]
    homes = [set() for _ in histories]
    for turn in range(4):
        disturb(cluster)
        for history, home in zip(histories, homes, strict=True):
            home.add(chat(cluster, history))
            history += [assistant(f"answer {turn}"), user(f"more {turn}")]
    assert all(len(home) == 1 for home in homes)
    assert set.union(*homes) == {"decode-0", "decode-1"}


def test_a_chat_with_the_same_beginning_but_another_answer_is_another_one(cluster, new_id):
    opening = [SYSTEM, user(new_id())]
    homes = []
    for answer in ("one", "two", "three", "four"):
        # Not from the first turn's engine: the whole list is what is known.
        home = chat(cluster, [*opening, assistant(answer), user("go on")], conversation_id=answer)
        homes.append(home)
        disturb(cluster)
    for answer, home in zip(("one", "two", "three", "four"), homes, strict=True):
        history = [*opening, assistant(answer), user("go on"), assistant("well"), user("end")]
        assert chat(cluster, history) == home


def test_edited_history_still_finds_its_beginning(cluster, new_id):
    opening = [SYSTEM, user(new_id())]
    first = chat(cluster, opening)
    chat(cluster, [*opening, assistant("long thoughts"), user("b")])
    disturb(cluster)
    edited = [*opening, assistant("short"), user("b"), assistant("c"), user("d")]
    assert chat(cluster, edited) == first


def test_long_messages_are_recognised_and_told_apart(cluster, new_id):
    mark = new_id()
    big = [user(f"{mark} {'x' * 200_000} {n}") for n in range(2)]
    homes = [chat(cluster, [message]) for message in big]
    disturb(cluster)
    for message, home in zip(big, homes, strict=True):
        assert chat(cluster, [message, assistant("a"), user("b")]) == home


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_raw_prompts_are_recognised_by_their_beginning(cluster, new_id, form):
    mark = new_id()
    prompts = [f"{mark} {n} " + "a story about nothing. " * (4 + 40 * n) for n in range(4)]
    homes = [set() for _ in prompts]
    for _ in range(4):
        disturb(cluster)
        for number, home in enumerate(homes):
            prompt = prompts[number]
            tokens = [ord(letter) for letter in prompt]
            home.add(complete(cluster, prompt if form == "text" else tokens))
            prompts[number] += f"And then {number} happened, which was no surprise at all. " * 9
    assert all(len(home) == 1 for home in homes)


def test_first_turns_spread_also_when_they_are_all_the_same(cluster):
    homes = [chat(cluster, [user("Hello")]) for _ in range(8)]
    assert set(homes) == {homes[0]}  # one at a time: the holder wins the tie
    for engine in cluster.decodes:
        engine.behave(gate="after_first")
    open_streams = [
        cluster.open(
            "POST",
            "/v1/chat/completions",
            {"model": "m", "messages": [user("Hello")], "stream": True},
        )
        for _ in range(8)
    ]
    spread = [reply.headers["x-kvt-decode"] for reply in open_streams]
    for engine in cluster.decodes:
        engine.open_gate()
    for reply in open_streams:
        reply.read()
    assert (spread.count("decode-0"), spread.count("decode-1")) == (4, 4)


def test_prefill_is_asked_to_look_at_the_decode_that_holds_it(cluster, new_id):
    conversation = {"X-Conversation-ID": new_id()}
    home = chat(cluster, [user("a" + conversation["X-Conversation-ID"])], conversation)
    asked = [b["kv_transfer_params"].get("kvt_ask") for e in cluster.prefills for b in e.bodies]
    assert asked == [None]
    for engine in cluster.prefills:
        engine.reset()
    chat(cluster, [user("b")], conversation)
    asked = [b["kv_transfer_params"].get("kvt_ask") for e in cluster.prefills for b in e.bodies]
    assert asked == [[home]]


def test_unnamed_engines_are_not_hinted_at(start):
    prefill, decode = start.engine("p"), start.engine("d")
    nameless = [type("Bare", (), {"name": "", "url": e.url}) for e in (prefill, decode)]
    router = start.router([], [], "--prefill", nameless[0].url, "--decode", nameless[1].url)
    for _ in range(2):
        reply = router.chat(headers={"X-Conversation-ID": "c"})
        assert reply.headers["x-kvt-decode"] == "decode-0"
    assert not any("kvt_ask" in body["kv_transfer_params"] for body in prefill.bodies)


def test_the_prefill_that_knows_the_conversation_is_preferred(cluster, new_id):
    conversation = {"X-Conversation-ID": new_id()}
    chat(cluster, [user("a")], conversation)
    (home,) = [engine for engine in cluster.prefills if engine.seen]
    for _ in range(3):
        disturb(cluster)
        before = len(home.seen)
        chat(cluster, [user("a")], conversation)
        assert len(home.seen) == before + 1


def test_affinity_is_bound_only_by_success(cluster, new_id):
    conversation = {"X-Conversation-ID": new_id()}
    for engine in cluster.decodes:
        engine.behave(status=500)
    assert cluster.chat(headers=conversation).status == 500
    for engine in cluster.decodes:
        engine.behave(status=400)
    assert cluster.chat(headers=conversation).status == 400
    for engine in (*cluster.decodes, *cluster.prefills):
        engine.reset()
        cluster.wait_state(engine.name, "up")
    misses = cluster.metric("kvt_router_affinity_total", result="miss")
    chat(cluster, [user(new_id())], conversation)
    assert cluster.metric("kvt_router_affinity_total", result="miss") == misses + 1


def test_contradicting_ids_are_counted_and_the_first_source_wins(cluster, new_id):
    one, two = new_id(), new_id()
    home = {name: chat(cluster, [user(name)], {"X-Conversation-ID": name}) for name in (one, two)}
    counted = cluster.metric("kvt_router_affinity_conflicts_total")
    reply = chat(cluster, [user("x")], {"X-Conversation-ID": one}, conversation_id=two)
    assert reply == home[one]
    assert cluster.metric("kvt_router_affinity_conflicts_total") == counted + 1
    assert (
        cluster.metric(
            "kvt_router_affinity_conflicts_total",
            used="header:X-Conversation-ID",
            ignored="body:conversation_id",
        )
        >= 1
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x" * 257, "length"),
        ("", "length"),
        ({"a": 1}, "type"),
        (True, "type"),
        ([], "type"),
        (1.5, "type"),
    ],
)
def test_an_id_that_is_none_is_ignored_and_counted(cluster, value, reason):
    labels = {"source": "body:conversation_id", "reason": reason}
    before = cluster.metric("kvt_router_ids_ignored_total", **labels)
    chat(cluster, [user("x")], conversation_id=value)
    assert cluster.metric("kvt_router_ids_ignored_total", **labels) == before + 1


def test_sources_can_be_chosen(start):
    router = start.cluster(
        1, 2, "--affinity", "body:metadata.thread,header:X-Odd", "--tenant", "none"
    )
    homes = set()
    for turn in range(4):
        homes.add(chat(router, [user(f"{turn}")], metadata={"thread": "t", "other": turn}))
        chat(router, [user("unrelated")])
    assert len(homes) == 1
    # An id in a default source means nothing here.
    spread = {chat(router, [user(f"{turn}")], {"X-Conversation-ID": "same"}) for turn in range(4)}
    assert len(spread) == 2
