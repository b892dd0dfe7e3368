from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport import errors
from kvtransport_conformance.wire import Channel, ChannelClosedError, decode, encode
from kvtransport_conformance.wire_errors import ForeignError, describe, revive

TREE = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.KVTransportError)
]


def made(cls):
    if cls is errors.UnsupportedError:
        return cls("no read here", capability="ops")
    return cls("no read here")


@pytest.mark.parametrize("cls", TREE)
def test_every_error_survives_the_wire(cls):
    again = revive(describe(made(cls)))
    assert type(again) is cls
    assert str(again) == "no read here"
    assert again.retryable == cls.retryable


def test_the_capability_comes_along():
    assert revive(describe(made(errors.UnsupportedError))).capability == "ops"


def test_anything_else_is_foreign():
    again = revive(describe(KeyError("agent_id")))
    assert type(again) is ForeignError
    assert "KeyError" in str(again)


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.binary(), st.integers(), st.text())))
def test_messages_survive(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("line", [b"", b"[1]", b"\xff\xfe", b'{"a": ', b"7"])
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match=r"JSON|Expecting|codec"):
        decode(line)


@pytest.fixture
def channel():
    """A channel to itself, and the descriptor that writes to it."""
    read_fd, write_fd = os.pipe()
    yield Channel(read_fd, write_fd), write_fd
    for number in (read_fd, write_fd):
        with contextlib.suppress(OSError):
            os.close(number)


def test_lines_may_come_in_pieces(channel):
    one, write_fd = channel
    os.write(write_fd, b'{"a": 1}\n{"b"')
    assert one.receive(1.0) == {"a": 1}
    with pytest.raises(TimeoutError):
        one.receive(0.01)
    os.write(write_fd, b": 2}\n")
    assert one.receive(1.0) == {"b": 2}


def test_the_end_is_told(channel):
    one, write_fd = channel
    os.close(write_fd)
    with pytest.raises(ChannelClosedError):
        one.receive(1.0)
