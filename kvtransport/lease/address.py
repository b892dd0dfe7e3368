"""Control-plane addresses: ``tcp://host:port`` with IPv4, IPv6 in brackets, or a name."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from kvtransport.errors import ConfigError

_TCP = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\[\]:/\s]+)):(?P<port>\d{1,5})\Z"
)


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address; ``host`` is without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        if self.host == "*":
            return True
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(text: str, setting: str, *, allow_port_0: bool = False) -> Address:
    """Parse ``tcp://host:port``; raises ``ConfigError`` naming ``setting``.

    ``localhost`` becomes 127.0.0.1: which family the name resolves to differs
    between machines.
    """
    found = _TCP.match(text) if len(text) <= 256 else None
    if found is None:
        raise ConfigError(f"{setting}: {text[:80]!r} is not of the form tcp://host:port")
    port = int(found["port"])
    if port > 65535 or (port == 0 and not allow_port_0):
        raise ConfigError(f"{setting}: port {port} is not from 1 to 65535")
    host = found["v6"] or found["host"]
    if found["v6"]:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ConfigError(f"{setting}: {host!r} is not an IPv6 address") from None
    return Address("127.0.0.1" if host == "localhost" else host, port)
