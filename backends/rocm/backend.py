"""ROCm and host memory through NIXL's UCX."""

from __future__ import annotations

import os

from kvtransport.backend import RegionSpec
from kvtransport.errors import UnsupportedError
from kvtransport_backends.nixl.config import UcxConfig
from kvtransport_backends.nixl.ucx import UcxBackend
from kvtransport_backends.rocm import INFO


class RocmBackend(UcxBackend):
    """NIXL's UCX with ROCm memory as NIXL's VRAM.

    PyTorch on ROCm calls its devices "cuda"; here they are ``"rocm"``.
    """

    info = INFO
    device_kind = "rocm"
    device_files = "kfd"
    no_rdma_hint = (
        "load the NIC's driver (ibv_devices must list it); within one machine set"
        " error_handling='none', because UCX's rocm_ipc is left out otherwise, and"
        " transports='rocm_ipc,rocm_copy,sm,self'; or set allow_fallback=true"
    )

    def check(self, config: UcxConfig) -> None:
        UcxBackend.check(self, config)
        if os.environ.get("UCX_MEM_MMAP_HOOK_MODE") == "none":
            self.unavailable(
                "UCX_MEM_MMAP_HOOK_MODE=none crashes UCX with ROCm",
                "unset UCX_MEM_MMAP_HOOK_MODE",
            )
        if config.error_handling == "peer" and "rocm_ipc" in config.transports:
            self.unavailable(
                "transports: UCX leaves rocm_ipc out while error_handling is 'peer', and would"
                " move GPU memory through the host",
                "set error_handling='none'",
            )

    def register(self, region: RegionSpec) -> None:
        if region.kind == "cuda":
            raise UnsupportedError(
                "kind: 'cuda' is what PyTorch calls a device on ROCm; register it as 'rocm'",
                capability="memory",
                backend=self.info.name,
            )
        UcxBackend.register(self, region)
