"""Mooncake Transfer Engine as a backend of kvtransport."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransport.backend import Backend, BackendInfo
from kvtransport.errors import ConfigError

WIRE = "mooncake-te-tcp/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """How the engine is started.

    ``address`` is this host's address as peers reach it; ``protocol`` is one of
    the engine's (only ``"tcp"`` was ever tried with this package);  ``device``
    names NICs for protocols that have any.  ``max_in_flight`` bounds the queue.
    """

    address: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    max_in_flight: int = 1024

    def __post_init__(self) -> None:
        if not self.address:
            raise ConfigError("address must be the address that peers reach this host at")
        if self.max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, not {self.max_in_flight}")


def _load() -> type[Backend]:
    from kvt_mooncake.backend import MooncakeBackend

    return MooncakeBackend


INFO = BackendInfo(
    name="mooncake",
    summary="host memory over Mooncake Transfer Engine (TCP)",
    config=MooncakeConfig,
    load=_load,
    wire=WIRE,
    install_hint=(
        "pip install mooncake-transfer-engine-non-cuda, and the system packages "
        "libibverbs1, librdmacm1 and libnuma1"
    ),
)
