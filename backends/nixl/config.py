"""Options that all NIXL backends, and all UCX-based ones, have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvtransport.errors import ConfigError

Progress = Literal["thread", "manual"]
ErrorMode = Literal["peer", "none"]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlConfig:
    """How the engine uses NIXL.

    ``module``
        The installed NIXL module: ``nixl_cu12``, ``nixl_cu13``, ``nixl_rocm``.
    ``progress``
        ``"thread"``: NIXL's own thread answers peers while nobody polls here.
        ``"manual"``: only ``poll`` does; a peer's first contact, and every
        transfer over TCP, then waits until this agent polls.
    ``progress_interval_us``
        How long that thread sleeps before it looks again.  UCX's thread wakes
        on events in between and rounds up to milliseconds (1 ms: 2 % of a
        core); libfabric's does not, so that this adds to every latency there.
    ``part_bytes``
        A transfer is given to NIXL in parts of this size, because over shared
        memory NIXL copies inside the call.
    ``post_budget_ms``
        When posting parts has taken this long, the rest waits for ``poll``.
    ``settle_ms``
        How long the engine keeps progressing after a peer was lost, before it
        reports that peer's transfers as failed and quiet.
    ``max_in_flight``
        Transfers posted and not complete; more raise ``BackpressureError``.
    """

    module: str = "nixl_cu12"
    progress: Progress = "thread"
    progress_interval_us: int = 1000
    part_bytes: int = 32 * MIB
    post_budget_ms: float = 2.0
    settle_ms: float = 50.0
    max_in_flight: int = 4096

    def __post_init__(self) -> None:
        if self.progress not in get_args(Progress):
            raise ConfigError(
                f"progress must be one of {', '.join(get_args(Progress))}, not {self.progress!r}"
            )
        if not self.module.isidentifier():
            raise ConfigError(f"module must be a Python module's name, not {self.module!r}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, not {value!r}")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("progress_interval_us", 1, 1_000_000),
    ("part_bytes", 64 * 1024, 1 << 40),
    ("post_budget_ms", 0.1, 1000.0),
    ("settle_ms", 0.0, 60_000.0),
    ("max_in_flight", 1, 1 << 20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxConfig(NixlConfig):
    """Options of a UCX-based backend.

    ``transports``
        UCX's transports, comma separated (``UCX_TLS``): ``"tcp"``,
        ``"rc,cuda"``.  Empty leaves the choice to UCX and the environment.
    ``net_devices``
        Network devices, comma separated (``UCX_NET_DEVICES``): ``"mlx5_0:1"``,
        ``"eth0"``; ``"all"`` lets UCX listen on every interface.  Empty: what
        ``UCX_NET_DEVICES`` says, else loopback (``"lo"``) only; with RDMA
        devices present that is refused, because they would not be used.
    ``error_handling``
        ``"peer"``: a dead peer is noticed on use.  ``"none"``: never noticed;
        some transports are only chosen then.
    ``allow_fallback``
        Let UCX use TCP for device memory where it finds nothing faster.
        Without it, a machine that has a GPU, no RDMA device and no explicit
        ``transports`` is refused at ``open``.
    """

    transports: str = ""
    net_devices: str = ""
    error_handling: ErrorMode = "peer"
    allow_fallback: bool = False

    def __post_init__(self) -> None:
        NixlConfig.__post_init__(self)
        if self.error_handling not in get_args(ErrorMode):
            raise ConfigError(
                f"error_handling must be one of {', '.join(get_args(ErrorMode))},"
                f" not {self.error_handling!r}"
            )
