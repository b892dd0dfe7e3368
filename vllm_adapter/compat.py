"""Which vLLM this connector works with, and which combinations it refuses.

What cannot work is refused at start-up, with the setting to change; nothing is
found out at the first transfer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvtransport.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtransport_vllm.config import AdapterConfig

OLDEST = (0, 30)
NEWEST = (0, 32)


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: AdapterConfig) -> None:
    """Raise ``UnsupportedError`` or ``ConfigError`` if this engine can't take part."""
    check_version(_version())
    _check_cache(kv_cache_config)
    _check_features(vllm_config)
    block = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    if block % settings.group_tokens:
        msg = (
            f"group_tokens={settings.group_tokens} does not divide this engine's block size "
            f"{block}; use a divisor of it, the same on every engine"
        )
        raise ConfigError(msg)


def check_version(version: str) -> None:
    """Refuse a vLLM whose hooks were never tested with this connector."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return  # a source build without a version: nothing to compare
    number = (int(found[1]), int(found[2]))
    if not OLDEST <= number <= NEWEST:
        msg = (
            f"vLLM {version} is not supported: this connector works with "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )
        raise UnsupportedError(msg, capability="vllm_version")


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _check_cache(config: KVCacheConfig) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or not isinstance(
        groups[0].kv_cache_spec, (FullAttentionSpec, MLAAttentionSpec)
    ):
        msg = (
            f"this model's KV cache has {len(groups)} groups ({', '.join(kinds)}); kvtransport "
            "moves models with one full-attention group only, so far"
        )
        raise UnsupportedError(msg, capability="kv_groups")


def _check_features(config: VllmConfig) -> None:
    parallel = config.parallel_config
    unsupported: tuple[tuple[bool, str, str], ...] = (
        (
            config.speculative_config is not None,
            "speculative decoding",
            "remove --speculative-config",
        ),
        (
            _attribute(parallel, "decode_context_parallel_size") > 1
            or _attribute(parallel, "prefill_context_parallel_size") > 1,
            "context parallelism",
            "set both context parallel sizes to 1",
        ),
    )
    for present, what, fix in unsupported:
        if present:
            msg = f"{what} is not supported with KVTransportConnector; {fix}"
            raise UnsupportedError(msg, capability=what)


def _attribute(config: Any, name: str) -> int:
    return int(getattr(config, name, 1) or 1)
