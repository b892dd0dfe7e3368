"""The edge to backends: what leaves it is always one of our errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvtransport.errors import BackendContractError, KVTransportError

P = ParamSpec("P")
R = TypeVar("R")


def call(method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a backend's method; a foreign exception becomes ``BackendContractError``."""
    try:
        return method(*args, **kwargs)
    except KVTransportError:
        raise
    except Exception as error:
        raise foreign(method, error) from error


def foreign(method: Callable[..., object], error: Exception) -> BackendContractError:
    """The error for an exception that a backend should have translated."""
    name = getattr(method, "__qualname__", str(method))
    return BackendContractError(
        f"{name} raised {type(error).__name__} instead of a KVTransportError: {error}",
        native=error,
    )
