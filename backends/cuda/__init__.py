"""CUDA memory over RDMA, through NIXL's UCX; host memory too, without a GPU."""

from __future__ import annotations

from kvtransport.backend import Backend, BackendInfo
from kvtransport_backends.cuda.config import CudaConfig

WIRE = "nixl-ucx/1"


def _load() -> type[Backend]:
    from kvtransport_backends.cuda.backend import CudaBackend

    return CudaBackend


INFO = BackendInfo(
    name="cuda",
    summary="CUDA and host memory over RDMA, NVLink, shared memory or TCP (NIXL with UCX)",
    config=CudaConfig,
    load=_load,
    wire=WIRE,
    install_hint="pip install 'kvtransport[cuda]' (or: pip install --no-deps nixl-cu12==1.5.0)",
)

__all__ = ["INFO", "WIRE", "CudaConfig"]
