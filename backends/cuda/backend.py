"""CUDA and host memory through NIXL's UCX."""

from __future__ import annotations

from kvtransport_backends.cuda import INFO
from kvtransport_backends.nixl.ucx import UcxBackend


class CudaBackend(UcxBackend):
    """NIXL's UCX with CUDA memory as NIXL's VRAM."""

    info = INFO
    device_kind = "cuda"
    device_files = "nvidia[0-9]*"
