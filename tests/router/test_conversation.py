"""Later turns are found among a conversation's own beginnings, whatever their length."""

from __future__ import annotations

import json

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvtransport_vllm.router.body import parse_fields
from kvtransport_vllm.router.conversation import content_keys
from kvtransport_vllm.router.identity import Keyring

RING = Keyring(bytes(16))
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


def keys(tenant=b"", **fields):
    return content_keys(RING.content(tenant), parse_fields(json.dumps(fields).encode()))


def finds(later, earlier):
    return set(later.lookups) & set(earlier.binds)


@example(length=126, growth=1, tokens=False)  # the closing quote is the 128th byte
@given(length=st.integers(64, 5000), growth=st.floats(0, 2.9), tokens=st.booleans())
def test_a_grown_prompt_finds_itself(length, growth, tokens):
    text = [ord("a") + n % 26 for n in range(length + int(length * growth))]
    first, second = text[:length], text
    if not tokens:
        first, second = ("".join(map(chr, ids)) for ids in (first, second))
    assert finds(keys(prompt=second), keys(prompt=first))


@given(length=st.integers(64, 5000), at=st.floats(0, 1))
def test_a_prompt_that_differs_early_finds_nothing(length, at):
    text = "a" * length
    changed = int(at * 60)
    other = text[:changed] + "b" + text[changed + 1 :]
    assert not finds(keys(prompt=other), keys(prompt=text))


@given(st.lists(TEXT, min_size=1, max_size=12), st.lists(TEXT, min_size=2, max_size=20))
def test_a_grown_chat_finds_itself(start, more):
    def message(number, text):
        return {"role": ("user", "assistant")[number % 2], "content": text}

    messages = [message(n, text) for n, text in enumerate([*start, *more])]
    first, second = keys(messages=messages[: len(start)]), keys(messages=messages)
    assert finds(second, first)
    assert second.lookups.index(first.binds[0]) == len(more)
    assert not finds(keys(b"tenant", messages=messages), first)
    assert not finds(keys(messages=messages, model="other"), first)


def test_only_a_first_turn_is_an_opening():
    user = {"role": "user", "content": "x"}
    assert keys(messages=[user]).opening
    assert keys(messages=[{"role": "system", "content": "x"}, user]).opening
    assert not keys(messages=[user, {"role": "assistant", "content": "y"}, user]).opening


def test_the_number_of_keys_is_bounded():
    many = [{"role": "assistant", "content": str(n)} for n in range(5000)]
    for fields in ({"messages": many}, {"prompt": "x" * 3_000_000}, {"prompt": [1] * 500_000}):
        found = keys(**fields)
        assert len(found.lookups) <= 100
        assert len(found.binds) <= 6


@given(st.recursive(st.none() | st.booleans() | st.integers() | TEXT, st.lists, max_leaves=5))
def test_whatever_is_there_gives_keys_or_none(value):
    for fields in ({"messages": value}, {"prompt": value}, {"messages": [value, value]}):
        keys(**fields)


def test_fields_are_raw():
    fields = parse_fields(b'{"a": [1,  2]}')
    assert isinstance(fields["a"], msgspec.Raw)
    assert bytes(fields["a"]) == b"[1,  2]"
