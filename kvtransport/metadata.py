"""Agent metadata: the bytes that one agent hands to another.

Layout (all integers big-endian)::

    0   4  magic "KVTM"
    4   2  metadata schema version
    6   2  version of the backend contract (SPI)
    8   4  payload length
    12  4  CRC-32 of the payload
    16  4  CRC-32 of bytes 0 .. 15
    20     payload: MessagePack array [header, body]

The first twenty bytes never change, so that versions can always be compared
before anything else is looked at.  Decoding has two phases: ``open_metadata``
reads the header and refuses foreign versions; only then does ``decode_body``
look at regions and the backend's own bytes.  The CRCs catch accidents, not
attackers: authenticate the channel that carries metadata.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated, Final

import msgspec

from kvtransport.backend import API_VERSION
from kvtransport.capabilities import Capabilities
from kvtransport.errors import IncompatiblePeerError, MalformedMetadataError
from kvtransport.region import Access

MAGIC: Final = b"KVTM"
SCHEMA_VERSION: Final = 1
MAX_METADATA_BYTES: Final = 16 << 20
"""Metadata above this size is refused unread; 16 MiB hold some 100,000 regions."""

INCARNATION_BYTES: Final = 16
_PREFIX: Final = struct.Struct(">4sHHIII")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Id = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What decides whether two agents may talk at all."""

    name: Name
    incarnation: Annotated[
        bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)
    ]
    epoch: Count
    wire: Name
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=4096)]


class RegionEntry(msgspec.Struct, frozen=True, array_like=True):
    """One exported region."""

    region_id: Id
    generation: Id
    name: Name
    nbytes: Id
    kind: Name
    device: Count
    access: Access


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Everything else; decoded only after the header was accepted."""

    capabilities: Capabilities
    regions: Annotated[tuple[RegionEntry, ...], msgspec.Meta(max_length=1 << 17)]
    backend: bytes


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    header: Header
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_payload_decoder = msgspec.msgpack.Decoder(_Payload)
_body_decoder = msgspec.msgpack.Decoder(Body)


def encode(header: Header, body: Body) -> bytes:
    """Build metadata; equal input gives equal bytes."""
    payload = _encoder.encode(_Payload(header, msgspec.Raw(_encoder.encode(body))))
    prefix = _PREFIX.pack(MAGIC, SCHEMA_VERSION, API_VERSION, len(payload), zlib.crc32(payload), 0)[
        :-4
    ]
    return prefix + struct.pack(">I", zlib.crc32(prefix)) + payload


def open_metadata(blob: bytes) -> tuple[Header, msgspec.Raw]:
    """Check versions, then decode the header; the body stays undecoded.

    Raises ``MalformedMetadataError`` for damaged bytes and
    ``IncompatiblePeerError`` naming both versions.
    """
    payload = _check_prefix(blob)
    try:
        decoded = _payload_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise MalformedMetadataError(f"metadata header: {error}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedMetadataError(f"metadata header cannot be decoded: {error}") from error
    return decoded.header, decoded.body


def _check_prefix(blob: bytes) -> memoryview:
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise MalformedMetadataError(f"metadata must be bytes, got {type(blob).__name__}")
    view = memoryview(blob)
    if not _PREFIX.size <= view.nbytes <= MAX_METADATA_BYTES:
        raise MalformedMetadataError(
            f"metadata has {view.nbytes} bytes; expected {_PREFIX.size} to {MAX_METADATA_BYTES}"
        )
    magic, schema, api, length, checksum, own = _PREFIX.unpack_from(view)
    if magic != MAGIC or zlib.crc32(view[: _PREFIX.size - 4]) != own:
        raise MalformedMetadataError("not kvtransport metadata, or its first 20 bytes are damaged")
    for field, theirs, ours in (
        ("metadata schema", schema, SCHEMA_VERSION),
        ("backend contract", api, API_VERSION),
    ):
        if theirs != ours:
            raise IncompatiblePeerError(
                f"{field} version differs: peer has {theirs}, this agent has {ours}; "
                "run the same release of kvtransport on both sides"
            )
    payload = view[_PREFIX.size :]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise MalformedMetadataError(
            f"metadata is truncated or damaged: {len(payload)} of {length} payload bytes"
        )
    return payload


def check_compatible(header: Header, wire: str, fingerprint: bytes) -> None:
    """Raise ``IncompatiblePeerError`` unless wire and fingerprint are equal."""
    if header.wire != wire:
        raise IncompatiblePeerError(
            f"wire differs: peer {header.name!r} speaks {header.wire!r}, this agent {wire!r}; "
            "configure the same backend on both sides",
            peer=header.name,
        )
    if header.fingerprint != fingerprint:
        raise IncompatiblePeerError(
            f"fingerprint differs: peer {header.name!r} has {_short(header.fingerprint)}, "
            f"this agent {_short(fingerprint)}; model, geometry or protocol are not the same",
            peer=header.name,
        )


def _short(fingerprint: bytes) -> str:
    text = fingerprint.hex()
    return f"{text[:32]}..." if len(text) > 32 else text or "none"


def decode_body(raw: msgspec.Raw) -> Body:
    """Decode what ``open_metadata`` left; raises ``MalformedMetadataError``."""
    try:
        body = _body_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise MalformedMetadataError(f"metadata body: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedMetadataError(f"metadata body cannot be decoded: {error}") from error
    for attribute in ("region_id", "name"):
        values = [getattr(region, attribute) for region in body.regions]
        if len(set(values)) != len(values):
            raise MalformedMetadataError(f"metadata lists two regions with one {attribute}")
    return body
