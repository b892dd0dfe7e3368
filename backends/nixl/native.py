"""NIXL's exceptions in our words.

NIXL raises one class per status code, with the code's name as the message and
no common base; they are told apart by their class names, because every NIXL
build (CUDA 12, CUDA 13, ROCm) defines classes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtransport.errors import (
    BackpressureError,
    IncompatiblePeerError,
    KVTransportError,
    PeerLostError,
    TransferFailedError,
    UnsupportedError,
)

_LOST = "nixlRemoteDisconnectError"
_UNSUPPORTED = "nixlNotSupportedError"
_MISMATCH = "nixlMismatchError"
_ACTIVE = "nixlRepostActiveError"


def is_lost(error: BaseException) -> bool:
    """Whether NIXL says that the peer's endpoint failed."""
    return type(error).__name__ == _LOST


def is_native(error: BaseException) -> bool:
    """Whether ``error`` was raised by NIXL's bindings."""
    name = type(error).__name__
    return (name.startswith("nixl") and name.endswith("Error")) or type(error) is RuntimeError


def translate(
    error: BaseException,
    what: str,
    *,
    backend: str,
    peer: str | None = None,
    otherwise: type[KVTransportError] = TransferFailedError,
) -> KVTransportError:
    """The error of ours that tells what NIXL's ``error`` means during ``what``."""
    name, detail = type(error).__name__, str(error)
    message = f"{what}: {detail}"
    if name == _LOST:
        return PeerLostError(
            f"{what}: the peer is gone or its connection broke ({detail})",
            backend=backend,
            peer=peer,
            native=error,
        )
    if name == _UNSUPPORTED:
        return UnsupportedError(message, capability="memory", backend=backend)
    if name == _MISMATCH:
        return IncompatiblePeerError(message, backend=backend, peer=peer, native=error)
    if name == _ACTIVE:
        return BackpressureError(message, backend=backend, peer=peer, native=error)
    return otherwise(message, backend=backend, peer=peer, native=error)


@contextmanager
def map_native(
    what: str,
    *,
    backend: str,
    peer: str | None = None,
    otherwise: type[KVTransportError] = TransferFailedError,
) -> Iterator[None]:
    """Run NIXL calls; its exceptions leave as ours, everything else unchanged."""
    try:
        yield
    except Exception as error:
        if not is_native(error):
            raise
        raise translate(error, what, backend=backend, peer=peer, otherwise=otherwise) from error
