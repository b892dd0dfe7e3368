"""Where vLLM put each block: from its KV cache configuration to block tables.

Memory model
    ``KVCacheTensor`` (``vllm/v1/kv_cache_interface.py``) places the page of
    layer l, block b at ``offset + l * layer_stride + b * block_stride`` of one
    allocation.  With layer-outermost layouts each layer (or each KV-head group
    of a layer) is a run of ``num_blocks`` pages and becomes one table; with
    block-outermost layouts one table of packed blocks covers all its layers.

One region is registered per allocation, whatever number of tables it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtransport.errors import UnsupportedError
from kvtransport_vllm.meta import TableSpec

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Allocation:
    """One storage to register: its name and the memory behind it."""

    region: str
    address: int
    nbytes: int
    device_type: str
    device_index: int
    owner: object


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All allocations and tables of one rank, in an order equal on all engines."""

    allocations: tuple[Allocation, ...]
    tables: tuple[TableSpec, ...]

    @property
    def block_nbytes(self) -> int:
        """Bytes that one block id stands for, over all layers of this rank."""
        return sum(table.block_nbytes for table in self.tables)


def describe(kv_caches: Mapping[str, Any], config: KVCacheConfig) -> KVLayout:
    """Describe the registered caches; raises ``UnsupportedError`` for unknown shapes."""
    allocations: dict[int, Allocation] = {}
    tables: dict[tuple[str, int], TableSpec] = {}
    for placed in config.kv_cache_tensors:
        name = next((layer for layer in placed.layers if layer in kv_caches), None)
        if name is None:
            continue
        allocation = _allocation(_tensor(name, kv_caches[name]), allocations)
        for table in _tables(allocation, placed, config.num_blocks):
            tables.setdefault((table.region, table.base), table)
    if not tables:
        msg = "vLLM registered no KV cache that its configuration describes"
        raise UnsupportedError(msg, capability="kv_layout")
    return KVLayout(tuple(allocations.values()), tuple(tables.values()))


def _tensor(name: str, cache: Any) -> torch.Tensor:
    if isinstance(cache, (list, tuple)):
        msg = (
            f"layer {name!r} keeps recurrent state, not attention KV; kvtransport moves "
            "full-attention KV only, serve this model without the connector"
        )
        raise UnsupportedError(msg, capability="kv_layout")
    tensor: torch.Tensor = cache
    return tensor


def _allocation(cache: torch.Tensor, known: dict[int, Allocation]) -> Allocation:
    storage = cache.untyped_storage()
    address = storage.data_ptr()
    if address not in known:
        known[address] = Allocation(
            region=f"kv.{len(known)}",
            address=address,
            nbytes=storage.nbytes(),
            device_type=cache.device.type,
            device_index=cache.device.index or 0,
            owner=storage,
        )
    return known[address]


def _tables(allocation: Allocation, placed: Any, num_blocks: int) -> list[TableSpec]:
    stride = int(placed.block_stride)
    span = num_blocks * stride
    if placed.layer_stride < span:  # block-outermost: a block packs all layers
        return [_table(allocation, 0, stride, num_blocks)]
    total = len(placed.layers) * int(placed.layer_stride)
    if total % span:
        msg = (
            f"layers of {placed.layers[0]!r} span {total} bytes, which is no multiple of "
            f"{num_blocks} blocks of {stride} bytes"
        )
        raise UnsupportedError(msg, capability="kv_layout")
    return [
        _table(allocation, int(placed.offset) + index * span, stride, num_blocks)
        for index in range(total // span)
    ]


def _table(allocation: Allocation, base: int, stride: int, count: int) -> TableSpec:
    if base + stride * count > allocation.nbytes:
        msg = (
            f"region {allocation.region} has {allocation.nbytes} bytes, but its blocks "
            f"would end at {base + stride * count}"
        )
        raise UnsupportedError(msg, capability="kv_layout")
    return TableSpec(allocation.region, base, stride, stride, count)
