"""ROCm memory over RDMA, through NIXL's UCX, with NIXL built for ROCm."""

from __future__ import annotations

from kvtransport.backend import Backend, BackendInfo
from kvtransport_backends.rocm.config import RocmConfig

WIRE = "nixl-ucx/1"


def _load() -> type[Backend]:
    from kvtransport_backends.rocm.backend import RocmBackend

    return RocmBackend


INFO = BackendInfo(
    name="rocm",
    summary="ROCm and host memory over RDMA or Infinity Fabric (NIXL for ROCm with UCX)",
    config=RocmConfig,
    load=_load,
    wire=WIRE,
    install_hint=(
        "no package has NIXL for ROCm: build it with -Dwheel_variant=rocm against a UCX"
        " configured --with-rocm (docs/backends/rocm.md)"
    ),
)

__all__ = ["INFO", "WIRE", "RocmConfig"]
