"""EFA with Neuron or CUDA memory, through NIXL's LIBFABRIC."""

from __future__ import annotations

from kvtransport.backend import Backend, BackendInfo
from kvtransport_backends.efa.config import EfaConfig

WIRE = "nixl-libfabric/1"


def _load() -> type[Backend]:
    from kvtransport_backends.efa.backend import EfaBackend

    return EfaBackend


INFO = BackendInfo(
    name="efa",
    summary="Neuron, CUDA and host memory over AWS EFA (NIXL with LIBFABRIC)",
    config=EfaConfig,
    load=_load,
    wire=WIRE,
    install_hint=(
        "pip install --no-deps nixl-cu12==1.5.0; on AWS run the EFA installer, which brings"
        " libfabric"
    ),
)

__all__ = ["INFO", "WIRE", "EfaConfig"]
