"""Options of the efa backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvtransport.errors import ConfigError
from kvtransport_backends.nixl.config import NixlConfig
from kvtransport_backends.nixl.liveness import split_endpoint

Device = Literal["neuron", "cuda", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EfaConfig(NixlConfig):
    """How the efa backend uses NIXL and libfabric; see also ``NixlConfig``.

    ``device``
        Device memory that is registered besides host memory.  One process has
        one accelerator runtime.
    ``allow_fallback``
        Let libfabric use another provider (TCP) where there is no EFA, which is
        an error at ``open`` otherwise.  Only EFA reaches device memory, so
        ``device`` must be ``"none"`` then.
    ``emulated``
        Believe libfabric, not the kernel, about the presence of EFA.  Only for
        the emulation in this project's tests; its results prove nothing about
        hardware.
    ``liveness``
        IPv4 address, with or without port, on which peers may watch this
        process: libfabric does not say that a peer has ended.  ``"0.0.0.0"``
        offers every address of this host, ``""`` none; without it a transfer
        with a dead peer ends by its deadline only.
    ``connect_timeout_s``
        How long ``import_peer`` waits for the peer's handshake.
    ``striping_threshold``
        Bytes from which one descriptor is spread over all NICs.
    """

    progress_interval_us: int = 100
    device: Device = "neuron"
    allow_fallback: bool = False
    emulated: bool = False
    liveness: str = ""
    connect_timeout_s: float = 5.0
    striping_threshold: int = 128 * 1024

    def __post_init__(self) -> None:
        NixlConfig.__post_init__(self)
        if self.device not in get_args(Device):
            raise ConfigError(
                f"device must be one of {', '.join(get_args(Device))}, not {self.device!r}"
            )
        if self.progress != "thread":
            raise ConfigError(
                "progress must be 'thread': libfabric's handshake is answered by it alone"
            )
        if self.liveness:
            split_endpoint(self.liveness, "liveness")
        if not 0.1 <= self.connect_timeout_s <= 60.0:
            raise ConfigError(
                f"connect_timeout_s must be between 0.1 and 60, not {self.connect_timeout_s}"
            )
        if self.striping_threshold < 4096:
            raise ConfigError(
                f"striping_threshold must be at least 4096, not {self.striping_threshold}"
            )
