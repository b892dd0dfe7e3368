"""Options of the cuda backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransport_backends.nixl.config import UcxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaConfig(UcxConfig):
    """How the cuda backend uses NIXL and UCX; the options are ``UcxConfig``'s."""
