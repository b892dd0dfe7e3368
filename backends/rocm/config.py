"""Options of the rocm backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransport_backends.nixl.config import UcxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RocmConfig(UcxConfig):
    """How the rocm backend uses NIXL and UCX; the options are ``UcxConfig``'s.

    With ``error_handling="peer"`` UCX leaves out its transport between GPUs of
    one machine (``rocm_ipc``).  Set ``"none"`` where peers share a machine; a
    dead peer is then noticed by deadlines only.
    """

    module: str = "nixl_rocm"
