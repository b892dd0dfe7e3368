"""Options of the host backend."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal, get_args

from kvtransport.errors import ConfigError

Path = Literal["auto", "vm", "tcp"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """How the host backend reaches its peers.

    ``path``
        ``"vm"``: same machine only, peers' memory is read directly.
        ``"tcp"``: always through the peer's serving thread.
        ``"auto"``: per peer, vm where it works, else tcp; ``counters()`` says
        which is used.  An explicit path never falls back.
    ``listen``
        ``"address:port"`` to serve TCP on, an IP literal; port 0 picks one.
        Not opened when ``path`` is ``"vm"``.
    ``advertise``
        ``"host:port"`` or ``"host"`` that peers connect to.  Needed when
        ``listen`` is a wildcard, otherwise the bound address.
    ``allow_ptracer``
        Under Yama's ``ptrace_scope`` 1, let any process of this user read this
        one's memory (``PR_SET_PTRACER_ANY``).  That is what vm needs there, and
        it also lets such processes attach a debugger.
    ``inline_bytes``
        Vm reads up to this size are done inside ``post``, without a thread.
    ``chunk_bytes``
        Bytes moved between two looks at a transfer's cancel flag.
    ``copy_threads``
        How many vm copies may run at once; each uses one core.
    ``stall_timeout_s``
        A peer that moves no byte for this long is given up.
    ``handshake_timeout_s``
        Deadline for connecting and proving tokens, on both sides.
    ``close_timeout_s``
        How long ``close`` waits for its threads.
    """

    path: Path = "auto"
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    allow_ptracer: bool = False
    inline_bytes: int = _MIB
    chunk_bytes: int = 32 * _MIB
    copy_threads: int = 1
    max_in_flight: int = 1024
    max_regions: int = 4096
    max_connections: int = 256
    max_notifications: int = 65536
    stall_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.path not in get_args(Path):
            raise ConfigError(f"path must be one of {', '.join(get_args(Path))}, not {self.path!r}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, not {value!r}")
        if self.path != "vm":
            self._check_addresses()

    def _check_addresses(self) -> None:
        host, _ = split_address(self.listen, "listen")
        try:
            wildcard = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            raise ConfigError(f"listen must begin with an IP address, not {host!r}") from None
        if wildcard and not self.advertise:
            raise ConfigError(
                f"listen is the wildcard {host!r}: set advertise to the address peers connect to"
            )
        if self.advertise:
            split_address(self.advertise, "advertise", port_optional=True)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("inline_bytes", 0, 4 * _MIB),
    ("chunk_bytes", 64 * 1024, 256 * _MIB),
    ("copy_threads", 1, 256),
    ("max_in_flight", 1, 1 << 20),
    ("max_regions", 1, 1 << 16),
    ("max_connections", 1, 1 << 16),
    ("max_notifications", 1, 1 << 24),
    ("stall_timeout_s", 0.1, 3600.0),
    ("handshake_timeout_s", 0.1, 600.0),
    ("close_timeout_s", 0.1, 600.0),
)


def split_address(text: str, option: str, *, port_optional: bool = False) -> tuple[str, int]:
    """Split ``host:port`` (IPv6 in brackets); raises ``ConfigError`` naming ``option``."""
    host, colon, port = text.rpartition(":")
    if port_optional and (not colon or text.endswith("]")):
        host, port = text, "0"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} must look like 127.0.0.1:5600 or [::1]:5600, not {text!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
