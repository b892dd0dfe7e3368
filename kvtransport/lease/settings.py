"""Settings of the control plane, checked before anything is bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtransport.errors import ConfigError
from kvtransport.lease.address import Address, parse_address
from kvtransport.lease.link import LinkTimes
from kvtransport.lease.security import ClusterSecret, load_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Where to listen, whom to ask, and the limits.

    ``listen`` may have port 0; ``advertise`` is the address that others reach,
    by default the bound one.  ``peers`` maps names to addresses.  ``secret`` is
    read from ``secret_file`` or the environment when not given.  Times are in
    seconds.  ``rate_per_s`` is the most messages accepted from one client.
    """

    listen: str = "tcp://127.0.0.1:0"
    advertise: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
    secret_file: str = ""
    secret: ClusterSecret | None = None
    lease_s: float = 10.0
    lookup_timeout_s: float = 1.0
    hello: LinkTimes = field(default_factory=LinkTimes)
    max_message_bytes: int = 4 * 2**20
    max_dynamic_peers: int = 64
    rate_per_s: float = 50_000.0

    def __post_init__(self) -> None:
        for name in ("lease_s", "lookup_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= 3600):
                raise ConfigError(f"{name} must be more than 0 and at most 3600, not {value!r}")
        for name, least in (("max_message_bytes", 4 * 2**20), ("max_dynamic_peers", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.rate_per_s >= 1:
            raise ConfigError(f"rate_per_s must be at least 1, not {self.rate_per_s!r}")
        if self.secret is None:
            object.__setattr__(self, "secret", load_secret(self.secret_file))
        listen = parse_address(self.listen, "listen", allow_port_0=True)
        peers = {
            f"peers[{name}]": parse_address(at, f"peers[{name}]") for name, at in self.peers.items()
        }
        if self.secret is None:
            _require_loopback({"listen": listen, **peers})
        self._check_advertise(listen, peers)

    def _check_advertise(self, listen: Address, peers: Mapping[str, Address]) -> None:
        reached = parse_address(self.advertise, "advertise") if self.advertise else listen
        if reached.is_wildcard:
            raise ConfigError(
                f"advertise must be set to an address that peers can connect to:"
                f" {'advertise' if self.advertise else 'listen'} = {reached} is none"
            )
        remote = [str(address) for address in peers.values() if not address.is_loopback]
        if reached.is_loopback and remote:
            raise ConfigError(
                f"{'advertise' if self.advertise else 'listen'} = {reached} can't be reached"
                f" from peer {remote[0]}; use an address of this machine"
            )


def _require_loopback(addresses: Mapping[str, Address]) -> None:
    for setting, address in addresses.items():
        if not address.is_loopback:
            raise ConfigError(
                f"{setting} = {address}: without a cluster secret only loopback addresses"
                " are allowed; set cluster_secret_file or KVT_CLUSTER_SECRET"
            )


def peers_from_config(peers: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Name -> address; a plain list gets its addresses as names."""
    if isinstance(peers, str):
        raise ConfigError(f"peers must be a list or a mapping, not {peers!r}")
    return dict(peers) if isinstance(peers, Mapping) else {at: at for at in peers}
