"""The frames of the serving protocol.

A request is a fixed head, its descriptors and, for WRITE and NOTIFY, a payload.
The answer is one status byte; an accepted READ is followed by its payload and a
second status byte, because a region can be withdrawn while it is being sent
(the rest of the payload is then zeros).  Everything is bounded before memory
is allocated for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import (
    DescriptorError,
    KVTransportError,
    OutOfBoundsError,
    PeerLostError,
    ProtocolError,
    StaleDescriptorError,
    TransferFailedError,
)

MAX_DESCRIPTORS = 8192
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
MAX_NOTIFY_BYTES = 64 * 1024

DESCRIPTOR = np.dtype([("region", "<i8"), ("offset", "<u8"), ("nbytes", "<u8"), ("source", "<u8")])
"""``source`` is the initiator's address for PULL and 0 otherwise."""

_HEAD = struct.Struct("<4sB3xIQ")
HEAD_BYTES = _HEAD.size
_MAGIC = b"KVh1"

Descriptors = NDArray[np.void]


class Request(IntEnum):
    """What the initiator asks; PULL is a WRITE whose bytes the target fetches."""

    READ = 1
    WRITE = 2
    PULL = 3
    NOTIFY = 4


class Status(IntEnum):
    """How the target answers."""

    OK = 0
    STALE = 1
    OUT_OF_BOUNDS = 2
    ACCESS = 3
    FAULT = 4
    CANNOT_PULL = 5
    UNKNOWN_SENDER = 6
    INBOX_FULL = 7


@dataclass(frozen=True, slots=True)
class Head:
    """``payload`` is the number of bytes that follow the descriptors."""

    request: Request
    count: int
    payload: int

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.request, self.count, self.payload)


def decode_head(data: bytes) -> Head:
    """Raises ``ProtocolError`` on anything we would not have sent."""
    magic, request, count, payload = _HEAD.unpack(data)
    if magic != _MAGIC or request not in Request._value2member_map_:
        raise ProtocolError("not a request of this protocol", backend="host")
    head = Head(Request(request), count, payload)
    is_notify = head.request is Request.NOTIFY
    limit = MAX_NOTIFY_BYTES if is_notify else MAX_PAYLOAD_BYTES
    if payload > limit or count > MAX_DESCRIPTORS or is_notify != (count == 0):
        raise ProtocolError(f"a request of {count} descriptors and {payload} bytes", backend="host")
    return head


def decode_descriptors(data: bytes, head: Head) -> Descriptors:
    """Raises ``ProtocolError`` when the lengths do not add up to the head's."""
    rows = np.frombuffer(data, DESCRIPTOR)
    # Compared one by one first: a sum of wild values could wrap around.
    if (rows["nbytes"] > head.payload).any() or int(rows["nbytes"].sum()) != head.payload:
        raise ProtocolError("descriptor lengths contradict the request", backend="host")
    return rows


def status_of(error: KVTransportError) -> Status:
    """The answer for a request that this error refused."""
    if isinstance(error, StaleDescriptorError):
        return Status.STALE
    if isinstance(error, OutOfBoundsError):
        return Status.OUT_OF_BOUNDS
    return Status.ACCESS if isinstance(error, DescriptorError) else Status.FAULT


_ERRORS: dict[Status, tuple[type[KVTransportError], str]] = {
    Status.STALE: (StaleDescriptorError, "a region was deregistered at the peer"),
    Status.OUT_OF_BOUNDS: (OutOfBoundsError, "the peer refused a range outside its region"),
    Status.ACCESS: (DescriptorError, "the peer's region does not allow this access"),
    Status.FAULT: (TransferFailedError, "the peer's region is not mapped memory"),
    Status.CANNOT_PULL: (
        TransferFailedError,
        "the peer may not read this process's memory (see allow_ptracer), and path is vm",
    ),
    Status.UNKNOWN_SENDER: (
        TransferFailedError,
        "the peer has not imported this agent's metadata, so it cannot attribute a notification",
    ),
    Status.INBOX_FULL: (TransferFailedError, "the peer has too many unread notifications"),
}


def raise_for(status: int) -> None:
    """Raise the initiator's error for a refusal; ``PeerLostError`` for nonsense."""
    if status == Status.OK:
        return
    try:
        kind, text = _ERRORS[Status(status)]
    except (ValueError, KeyError):
        raise PeerLostError(f"the peer answered with status {status}", backend="host") from None
    raise kind(text, backend="host")
