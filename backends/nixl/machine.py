"""What hardware the kernel says this machine has; nothing is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_AMAZON = "0x1d0f"


@dataclass(frozen=True, slots=True)
class Machine:
    """The file system under ``root``, which is ``/`` except in tests."""

    root: Path

    def devices(self, pattern: str) -> list[str]:
        """Device files in ``/dev`` that match a glob pattern, ``"nvidia[0-9]*"``."""
        return sorted(path.name for path in (self.root / "dev").glob(pattern))

    def rdma_devices(self) -> list[str]:
        """RDMA devices with a driver: InfiniBand, RoCE, EFA."""
        try:
            return sorted(path.name for path in self._infiniband.iterdir())
        except OSError:
            return []

    def efa_devices(self) -> list[str]:
        """The RDMA devices that are Amazon's."""
        return [name for name in self.rdma_devices() if self._vendor(name) == _AMAZON]

    def verbs_without_hardware(self) -> bool:
        """Whether verbs providers are installed and there is nothing that they drive."""
        providers = self.root / "etc" / "libibverbs.d"
        return providers.is_dir() and any(providers.iterdir()) and not self.rdma_devices()

    @property
    def _infiniband(self) -> Path:
        return self.root / "sys" / "class" / "infiniband"

    def _vendor(self, name: str) -> str:
        try:
            return (self._infiniband / name / "device" / "vendor").read_text().strip()
        except OSError:
            return ""
