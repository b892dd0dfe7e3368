"""Local memory that peers can reach: buffers and regions.

A region owns its buffer: as long as the region is registered, or quarantined,
the buffer stays alive whatever the caller does with his own reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from kvtransport.errors import RegistrationError

Access: TypeAlias = frozenset[Literal["read", "write"]]
_ACCESS: dict[str, Access] = {
    "": frozenset(),
    "r": frozenset({"read"}),
    "w": frozenset({"write"}),
    "rw": frozenset({"read", "write"}),
}


def parse_access(access: str) -> Access:
    """Turn ``"r"``, ``"w"``, ``"rw"`` or ``""`` into what peers may do."""
    try:
        return _ACCESS[access]
    except (KeyError, TypeError):
        raise RegistrationError(f"access must be 'r', 'w', 'rw' or '', got {access!r}") from None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where a caller's buffer lies, and the object that keeps it alive."""

    address: int
    nbytes: int
    writable: bool
    owner: object


def resolve_buffer(buffer: Any, kind: str) -> Buffer:
    """Find address and size of ``buffer``.

    Accepts ``(address, nbytes, owner)``, anything with ``data_ptr()`` and
    ``nbytes`` (a torch tensor), and anything with the buffer protocol.  Raises
    ``RegistrationError`` for empty, non-contiguous or unusable buffers and for
    a tensor whose device contradicts ``kind``.
    """
    if isinstance(buffer, tuple):
        found = _from_tuple(buffer)
    elif hasattr(buffer, "data_ptr"):
        found = _from_tensor(buffer, kind)
    else:
        found = _from_buffer_protocol(buffer)
    if found.nbytes <= 0:
        raise RegistrationError("cannot register an empty buffer; nbytes must be at least 1")
    if found.address <= 0 or found.address + found.nbytes > 1 << 64:
        raise RegistrationError(
            f"buffer at {found.address:#x} with {found.nbytes} bytes is not a valid address range"
        )
    return found


def _from_tuple(buffer: tuple[Any, ...]) -> Buffer:
    if len(buffer) != 3 or not all(type(v) is int for v in buffer[:2]):
        raise RegistrationError("a buffer tuple must be (address: int, nbytes: int, owner)")
    address, nbytes, owner = buffer
    return Buffer(address, nbytes, writable=True, owner=owner)


def _from_tensor(tensor: Any, kind: str) -> Buffer:
    contiguous = getattr(tensor, "is_contiguous", None)
    if contiguous is not None and not contiguous():
        raise RegistrationError("tensor is not contiguous; register its contiguous base instead")
    device = getattr(getattr(tensor, "device", None), "type", None)
    # Torch calls ROCm devices "cuda", so only host against device can be told.
    if device is not None and (device == "cpu") != (kind == "host"):
        raise RegistrationError(
            f"tensor lies on device {device!r} but kind is {kind!r}; pass the matching kind"
        )
    return Buffer(int(tensor.data_ptr()), int(tensor.nbytes), writable=True, owner=tensor)


def _from_buffer_protocol(buffer: Any) -> Buffer:
    try:
        view = memoryview(buffer)
    except TypeError:
        raise RegistrationError(
            f"cannot register {type(buffer).__name__}: it has neither the buffer protocol nor "
            "data_ptr(); pass (address, nbytes, owner)"
        ) from None
    if not view.c_contiguous:
        raise RegistrationError("buffer is not C-contiguous; register a contiguous buffer")
    if view.nbytes == 0:
        return Buffer(1, 0, writable=False, owner=None)
    # The array holds a buffer export: a bytearray cannot be resized, an mmap not closed.
    array = np.frombuffer(view.cast("B") if view.ndim != 1 or view.format != "B" else view, "u1")
    return Buffer(array.ctypes.data, array.nbytes, writable=not view.readonly, owner=array)


class Region:
    """Registered local memory; a context manager that deregisters at its end.

    ``region_id`` is never reused within an agent; ``generation`` counts the
    registrations under one name.  ``access`` is what peers may do, ``writable``
    whether the memory can be the destination of a local read.  Instances come
    from ``Agent.register`` only.
    """

    __slots__ = (
        "_owner",
        "_release",
        "access",
        "address",
        "device",
        "generation",
        "kind",
        "name",
        "nbytes",
        "quarantined_bytes",
        "region_id",
        "registered",
        "users",
        "writable",
    )

    def __init__(
        self,
        buffer: Buffer,
        *,
        region_id: int,
        generation: int,
        name: str,
        kind: str,
        device: int,
        access: Access,
        release: Callable[[Region], None],
    ) -> None:
        self.region_id = region_id
        self.generation = generation
        self.name = name
        self.kind = kind
        self.device = device
        self.address = buffer.address
        self.nbytes = buffer.nbytes
        self.writable = buffer.writable
        self.access = access
        self.registered = True
        self.users = 0
        """Transfers that are not terminal and use this region."""
        self.quarantined_bytes = 0
        """Bytes that a quarantined transfer may still touch; they never become free."""
        self._owner: object = buffer.owner
        self._release = release

    @property
    def busy(self) -> bool:
        """Whether deregistering must be refused."""
        return self.users > 0 or self.quarantined_bytes > 0

    def drop_buffer(self) -> None:
        """Let go of the buffer; the core calls this after deregistration."""
        self._owner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.registered:
            self._release(self)

    def __repr__(self) -> str:
        return f"<Region {self.name!r} id={self.region_id} {self.kind} {self.nbytes} bytes>"
