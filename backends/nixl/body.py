"""What one NIXL agent tells its peers: the backend's part of the metadata.

NIXL's own metadata is opaque and its decoder trusts it, so the whole body
carries a digest: a damaged one is refused before NIXL sees any of it.  (The
digest finds damage, not malice; authenticity is the control plane's task.)
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from kvtransport.errors import IncompatiblePeerError, MalformedMetadataError

MAX_REGIONS = 65536
_DIGEST = 16
_ADDRESS_SPACE = 1 << 64
_NATIVE_HEAD = b"nixlSerDes|Agent"


class RegionEntry(msgspec.Struct, frozen=True, array_like=True):
    """One reachable region.  ``device_id`` is NIXL's; ``native`` its metadata."""

    region_id: int
    kind: str
    device_id: int
    address: int
    nbytes: int
    access: tuple[Literal["read", "write"], ...]
    native: bytes


class Body(msgspec.Struct, frozen=True, array_like=True):
    """``agent`` is the NIXL name, ``connection`` NIXL's connection metadata."""

    plugin: str
    agent: str
    connection: bytes
    regions: tuple[RegionEntry, ...]
    contact: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Body)


def encode(body: Body) -> bytes:
    """Encode a body for ``decode``."""
    payload = _encoder.encode(body)
    return _digest(payload) + payload


def decode(data: bytes, *, plugin: str, backend: str) -> Body:
    """Decode a peer's body.

    Raises ``MalformedMetadataError`` for damaged bytes and values out of range,
    ``IncompatiblePeerError`` when the peer uses another NIXL plugin.
    """
    digest, payload = data[:_DIGEST], data[_DIGEST:]
    if len(digest) < _DIGEST or digest != _digest(payload):
        raise MalformedMetadataError("the metadata's digest does not match", backend=backend)
    try:
        body = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise MalformedMetadataError(f"metadata: {error}", backend=backend) from error
    _check(body, backend)
    if body.plugin != plugin:
        raise IncompatiblePeerError(
            f"plugin: the peer uses NIXL's {body.plugin!r}, this agent {plugin!r}",
            backend=backend,
        )
    return body


def _check(body: Body, backend: str) -> None:
    if not body.agent or not body.connection:
        raise MalformedMetadataError("the metadata names no agent", backend=backend)
    if len(body.regions) > MAX_REGIONS:
        raise MalformedMetadataError(
            f"the metadata has {len(body.regions)} regions, more than {MAX_REGIONS}",
            backend=backend,
        )
    for region in body.regions:
        inside = region.address >= 0 and region.nbytes > 0
        if not inside or region.address + region.nbytes > _ADDRESS_SPACE:
            raise MalformedMetadataError(
                f"region {region.region_id} has an impossible range", backend=backend
            )
    for metadata in (body.connection, *(region.native for region in body.regions)):
        if not _describes(metadata, body.agent):
            raise MalformedMetadataError(
                "a part of the metadata describes another agent", backend=backend
            )
    if len({region.region_id for region in body.regions}) != len(body.regions):
        raise MalformedMetadataError("a region id occurs twice", backend=backend)


def _describes(metadata: bytes, agent: str) -> bool:
    """Whether NIXL's metadata is about ``agent``, as far as its first field is known.

    NIXL would take forged metadata for another peer's and break that peer.
    """
    if not metadata.startswith(_NATIVE_HEAD):
        return True  # another version of NIXL; the loader compares the name again
    name = agent.encode()
    return metadata.startswith(_NATIVE_HEAD + len(name).to_bytes(8, "little") + name + b"|")


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST, person=b"kvt-nixl").digest()
