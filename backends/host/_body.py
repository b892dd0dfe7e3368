"""What an agent tells its peers about itself, as bytes.

Whoever holds this blob can read and write the agent's regions: it contains the
token that opens its serving socket.  It must travel over a trusted channel and
is never logged.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvtransport.errors import ConfigError, MalformedMetadataError
from kvtransport_backends.host._identity import ProcessIdentity
from kvtransport_backends.host.config import split_address

AGENT_ID_BYTES = 16
TOKEN_BYTES = 32
_MAX_BODY_BYTES = 16 * 1024 * 1024

Natural = Annotated[int, Meta(ge=0)]
AgentId = Annotated[bytes, Meta(min_length=AGENT_ID_BYTES, max_length=AGENT_ID_BYTES)]
Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class RegionEntry(msgspec.Struct, frozen=True, array_like=True):
    """One region; ``access`` is the sum of 1 (read) and 2 (write)."""

    region_id: Natural
    address: Natural
    nbytes: Annotated[int, Meta(gt=0)]
    access: Annotated[int, Meta(ge=0, le=3)]
    slot: Natural


class VmAccess(msgspec.Struct, frozen=True, array_like=True):
    """How to read this process's memory from the same machine."""

    identity: ProcessIdentity
    guard_address: Natural
    guard_slots: Annotated[int, Meta(ge=0, le=1 << 20)]
    socket_name: Annotated[bytes, Meta(max_length=107)]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """``vm`` is absent under path "tcp", ``address`` is empty under "vm"."""

    agent_id: AgentId
    token: Token
    vm: VmAccess | None
    address: Annotated[str, Meta(max_length=300)]
    regions: tuple[RegionEntry, ...]

    def __repr__(self) -> str:
        return f"Body(agent {self.agent_id.hex()}, {len(self.regions)} regions)"


def encode(body: Body) -> bytes:
    """Serialize ``body`` as msgpack."""
    return msgspec.msgpack.encode(body)


def decode(data: bytes) -> Body:
    """Check everything a stranger could have got wrong; nothing is trusted later.

    Raises ``MalformedMetadataError``.
    """
    if len(data) > _MAX_BODY_BYTES:
        raise MalformedMetadataError(
            f"host metadata has {len(data)} bytes, at most {_MAX_BODY_BYTES} are accepted",
            backend="host",
        )
    try:
        body = msgspec.msgpack.decode(data, type=Body)
    except msgspec.MsgspecError as error:
        raise MalformedMetadataError(
            f"host metadata cannot be decoded: {error}", backend="host", native=error
        ) from error
    if body.address:
        try:
            split_address(body.address, "its address")
        except ConfigError as error:
            raise MalformedMetadataError(f"host metadata: {error}", backend="host") from error
    _check_regions(body)
    return body


def _check_regions(body: Body) -> None:
    slots = body.vm.guard_slots if body.vm else 0
    seen: set[int] = set()
    for entry in body.regions:
        if entry.region_id in seen:
            problem = "appears twice"
        elif entry.address + entry.nbytes > 1 << 63:
            problem = "reaches beyond the address space"
        elif body.vm and entry.slot >= slots:
            problem = f"has guard slot {entry.slot} of {slots}"
        else:
            seen.add(entry.region_id)
            continue
        raise MalformedMetadataError(
            f"host metadata: region {entry.region_id} {problem}", backend="host"
        )
