"""Errors as plain values between processes, and back as the same class."""

from __future__ import annotations

from typing import Any

from kvtransport import errors


class ForeignError(Exception):
    """An operation raised something that is not of the library's error tree."""


def describe(error: BaseException) -> dict[str, Any]:
    """Name, message and retryability of ``error``."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "retryable": bool(getattr(error, "retryable", False)),
        "ours": isinstance(error, errors.KVTransportError),
        "capability": getattr(error, "capability", None),
    }


def revive(described: dict[str, Any]) -> Exception:
    """Build an exception of the described class; ``ForeignError`` for unknown ones."""
    cls = getattr(errors, described["type"], None)
    if not described["ours"] or not (
        isinstance(cls, type) and issubclass(cls, errors.KVTransportError)
    ):
        return ForeignError(f"{described['type']}: {described['message']}")
    # Not the constructor: some of these classes take arguments of their own.
    blank: Any = cls
    error: errors.KVTransportError = blank.__new__(blank)
    errors.KVTransportError.__init__(error, described["message"])
    if described["capability"] is not None:
        error.capability = described["capability"]  # type: ignore[attr-defined]
    return error
