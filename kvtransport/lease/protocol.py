"""Control messages: typed, versioned, bounded.  Only durations cross the wire.

Format
    One frame: the magic ``KV``, the protocol version and a zero byte, then one
    tagged msgpack array.  The header is decoded first, so that two versions
    can tell each other apart whatever the messages look like.

Errors
    ``decode`` raises ``ProtocolError`` for everything that is not a well-formed
    message within its limits, and ``VersionMismatchError`` for another version.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvtransport.errors import ProtocolError
from kvtransport.lease.digest import DIGEST_NBYTES

PROTOCOL_VERSION = 1
MAGIC = b"KV"
HEADER = MAGIC + bytes((PROTOCOL_VERSION, 0))

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Name = Annotated[str, Meta(max_length=256)]
MAX_REQUEST_NAME = 512
RequestName = Annotated[str, Meta(max_length=MAX_REQUEST_NAME)]
Text = Annotated[str, Meta(max_length=4096)]
Facts = Annotated[dict[Name, Text], Meta(max_length=256)]
Rank = Annotated[int, Meta(ge=0, le=65535)]


class VersionMismatchError(ProtocolError):
    """The other side speaks protocol ``theirs``."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"protocol version: mine {PROTOCOL_VERSION}, theirs {theirs}")
        self.theirs = theirs


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of all messages."""


class Hello(_Message, tag="hello", frozen=True, array_like=True):
    """A reader introduces itself.  ``known_revision`` of the agents saves sending them again."""

    request_id: Id
    engine_id: Name
    incarnation: Name
    address: Name
    fingerprint: Facts
    versions: Facts
    known_revision: int = -1


class HelloReply(_Message, tag="hello_reply", frozen=True, array_like=True):
    """The owner introduces itself.  ``agents`` is ``None`` when the reader knows the revision."""

    request_id: Id
    engine_id: Name
    incarnation: Name
    fingerprint: Facts
    versions: Facts
    ready: bool
    revision: int
    agents: dict[Rank, bytes] | None = None


class Lookup(_Message, tag="lookup", frozen=True, array_like=True):
    """Asks ``incarnation`` for the longest prefix of ``chain`` that it holds."""

    request_id: Id
    incarnation: Name
    reader: Name
    chain: bytes
    tokens: Count
    group_tokens: Count
    min_tokens: Count
    duration_s: Seconds
    handoff_request_id: RequestName = ""


class LookupReply(_Message, tag="lookup_reply", frozen=True, array_like=True):
    """A grant, or with ``lease_id`` 0 the reason why there is none."""

    request_id: Id
    reason: Name
    lease_id: Id = 0
    tokens: Count = 0
    tail_tokens: Count = 0
    tail_digest: bytes = b""
    block_runs: list[bytes] = []
    duration_s: Seconds = 0.0
    purpose: Name = ""
    held_tokens: Count = 0


class Renew(_Message, tag="renew", frozen=True, array_like=True):
    """Let the lease end ``duration_s`` after you read this."""

    request_id: Id
    incarnation: Name
    lease_id: Id
    duration_s: Seconds


class RenewReply(_Message, tag="renew_reply", frozen=True, array_like=True):
    """Whether the lease is still live, and for how long."""

    request_id: Id
    lease_id: Id
    live: bool
    duration_s: Seconds = 0.0


class Release(_Message, tag="release", frozen=True, array_like=True):
    """The reader is done; no answer."""

    incarnation: Name
    lease_id: Id
    delivered: bool


class Discard(_Message, tag="discard", frozen=True, array_like=True):
    """Nobody will fetch this handoff; no answer."""

    incarnation: Name
    handoff_request_id: RequestName


class StatusRequest(_Message, tag="status", frozen=True, array_like=True):
    """For ``kvt status``."""

    request_id: Id


class StatusReply(_Message, tag="status_reply", frozen=True, array_like=True):
    """``body`` is JSON."""

    request_id: Id
    body: bytes


class Error(_Message, tag="error", frozen=True, array_like=True):
    """The request was refused.  ``code`` is one word, ``message`` is for people."""

    request_id: Id
    code: Name
    message: Text


ToOwner: TypeAlias = Hello | Lookup | Renew | Release | Discard | StatusRequest
ToReader: TypeAlias = HelloReply | LookupReply | RenewReply | StatusReply | Error

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()
_to_owner: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)
_to_reader: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)


def encode(message: ToOwner | ToReader) -> bytes:
    """One frame, header and body."""
    return HEADER + _encoder.encode(message)


def decode_to_owner(frame: bytes) -> ToOwner:
    """Decode what a reader sent; see the module's errors."""
    message = _decode(_to_owner, frame)
    if isinstance(message, Lookup):
        _check_lookup(message)
    elif isinstance(message, Renew):
        _check_finite(message.duration_s)
    return message


def decode_to_reader(frame: bytes) -> ToReader:
    """Decode what an owner sent; see the module's errors."""
    message = _decode(_to_reader, frame)
    if isinstance(message, LookupReply | RenewReply):
        _check_finite(message.duration_s)
    if isinstance(message, LookupReply) and len(message.tail_digest) not in (0, DIGEST_NBYTES):
        raise ProtocolError(f"tail_digest has {len(message.tail_digest)} bytes")
    return message


def _decode(decoder: msgspec.msgpack.Decoder[_M], frame: bytes) -> _M:
    if len(frame) < len(HEADER) or frame[:2] != MAGIC:
        raise ProtocolError("not a kvtransport control message")
    if frame[2] != PROTOCOL_VERSION:
        raise VersionMismatchError(frame[2])
    try:
        return decoder.decode(memoryview(frame)[len(HEADER) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None


def _check_lookup(message: Lookup) -> None:
    _check_finite(message.duration_s)
    groups, rest = divmod(len(message.chain), DIGEST_NBYTES)
    size = message.group_tokens
    if rest or size < 1 or message.tokens // size != groups:
        raise ProtocolError(
            f"lookup: {len(message.chain)} digest bytes do not fit"
            f" {message.tokens} tokens in groups of {size}"
        )


def _check_finite(seconds: float) -> None:
    if not math.isfinite(seconds):
        raise ProtocolError(f"duration_s is {seconds}")
