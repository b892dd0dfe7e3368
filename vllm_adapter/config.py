"""The connector's settings: ``kv_connector_extra_config``, typed and checked.

Unknown keys are refused with the nearest valid one.  Upstream's key names mean
what they mean upstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvtransport.config import decode
from kvtransport.errors import ConfigError
from kvtransport.policy.options import require_range
from kvtransport.policy.retention import MOST_TTL_S
from kvtransport_vllm.tenants import check_quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Settings of one engine; times in seconds."""

    backend: str = "host"
    backend_config: Mapping[str, Any] = field(default_factory=dict)
    listen: str = "tcp://127.0.0.1:0"
    """Where the control plane listens; data-parallel rank r adds r to the port."""
    advertise: str = ""
    """What other engines are told to connect to, when it is not ``listen``."""
    peers: tuple[str, ...] | Mapping[str, str] = ()
    """Control addresses of the engines to exchange KV with, or name -> address."""
    cluster_secret_file: str = ""

    bidirectional_kv_xfer: bool = True
    """Whether decode engines retain KV and prefill engines pull it back."""
    decoder_kv_blocks_ttl: float = 480.0
    kv_recompute_threshold: int = 64
    """Tokens beyond the local hit below which a prefill engine recomputes."""
    retention: str = "budgeted"
    retention_config: Mapping[str, Any] = field(default_factory=dict)
    recompute: str = "threshold"
    recompute_config: Mapping[str, Any] = field(default_factory=dict)
    failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose pull failed on this engine."""

    handoff_ttl_s: float = 120.0
    """How long a prefill engine keeps a prompt's KV that nobody fetches."""
    lease_s: float = 10.0
    lookup_timeout_s: float = 1.0
    transfer_timeout_s: float = 30.0
    drain_timeout_s: float = 5.0
    """How long a failed transfer may take to become quiet before quarantine."""
    group_tokens: int = 16
    turn_log: str = ""
    """File to which one JSON line per turn is appended; empty: none."""

    def __post_init__(self) -> None:
        require_range("decoder_kv_blocks_ttl", self.decoder_kv_blocks_ttl, 0, MOST_TTL_S)
        for name in (
            "handoff_ttl_s",
            "lease_s",
            "lookup_timeout_s",
            "transfer_timeout_s",
            "drain_timeout_s",
        ):
            value = getattr(self, name)
            if not 0 < value < 1e6:
                msg = f"{name}={value!r} must be a number of seconds between 0 and 1e6"
                raise ConfigError(msg)
        if self.kv_recompute_threshold < 0:
            msg = f"kv_recompute_threshold={self.kv_recompute_threshold} must be 0 or more tokens"
            raise ConfigError(msg)
        check_quotas(self.retention_config.get("tenant_quotas"))
        if not 1 <= self.group_tokens <= 1024:  # a sane range, said in the text
            msg = f"group_tokens={self.group_tokens} must be between 1 and 1024"
            raise ConfigError(msg)

    @property
    def named_peers(self) -> dict[str, str]:
        """Peer name -> control address; unnamed peers are named by their address."""
        if isinstance(self.peers, Mapping):
            return dict(self.peers)
        return {address: address for address in self.peers}


def load(extra: Mapping[str, Any]) -> AdapterConfig:
    """Decode ``kv_connector_extra_config``; ``ConfigError`` names what is wrong."""
    return decode(AdapterConfig, extra, where="kv_connector_extra_config")
