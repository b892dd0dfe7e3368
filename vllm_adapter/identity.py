"""What must agree before two engines may exchange KV.

The handshake compares these facts one by one and a refusal names the fact and
both values.  Only facts that change the bytes of a block are listed: wrapping
the connector, another port or another cache size changes nothing here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SAMPLE_BYTES = 4096
_IGNORED_MODEL_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "architectures_source", "name_or_path"}
)


def fingerprint(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, group_tokens: int
) -> dict[str, str]:
    """Every fact that both engines must share, as text."""
    import vllm

    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    spec: Any = group.kv_cache_spec
    return {
        "model": model_digest(model.hf_config),
        "weights": weights_digest(str(model.model), model.revision),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_tokens": str(spec.block_size),
        "page_bytes": str(spec.page_size_bytes),
        "kv_heads_per_rank": str(getattr(spec, "num_kv_heads", "")),
        "head_size": str(getattr(spec, "head_size", "")),
        "attention": type(spec).__name__,
        "layers": str(sum(len(g.layer_names) for g in kv_cache_config.kv_cache_groups)),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "device": _device(vllm_config),
        "group_tokens": str(group_tokens),
        "vllm": vllm.__version__.split("+")[0],
    }


def model_digest(hf_config: Any) -> str:
    """Digest of the model's own configuration, wherever it was loaded from."""
    facts = {k: v for k, v in hf_config.to_dict().items() if k not in _IGNORED_MODEL_KEYS}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def weights_digest(model: str, revision: str | None) -> str:
    """Identity of the weights: sampled bytes of local files, else the revision.

    A few KiB of every tensor are read, not gigabytes: two checkpoints of one
    training differ in each tensor they touched.
    """
    path = Path(model)
    files = sorted(
        f for pattern in ("*.safetensors", "*.bin", "*.gguf") for f in path.glob(pattern)
    )
    if not files:
        return f"{model}@{revision or 'main'}"
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            for offset in _sample_offsets(stream, size):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(stream: BinaryIO, size: int) -> list[int]:
    """Where to sample: the start of each tensor, else 256 places spread evenly.

    safetensors: 8 bytes little-endian header length, a JSON header with each
    tensor's ``data_offsets``, then the data
    (https://huggingface.co/docs/safetensors#format).
    """
    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if stream.name.endswith(".safetensors") and length < size:
        header = json.loads(stream.read(length))
        starts = [entry["data_offsets"][0] for entry in header.values() if "dtype" in entry]
        return [0, *sorted(8 + length + start for start in starts)]
    return sorted({size * i // 256 for i in range(256)})


def _device(vllm_config: VllmConfig) -> str:
    """Device type and, on CPUs, the instruction set that decides how KV is packed."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return str(current_platform.device_type)
    from vllm.platforms.interface import CpuArchEnum

    arch = current_platform.get_cpu_architecture()
    name = arch.name.lower() if isinstance(arch, CpuArchEnum) else str(arch)
    return f"cpu/{name}/{_cpu_isa(vllm_config)}"


def _cpu_isa(vllm_config: VllmConfig) -> str:
    """The layout that vLLM's CPU attention will choose; unknown when it moved."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return "unknown"
    model = vllm_config.model_config
    return str(
        _get_attn_isa(model.dtype, vllm_config.cache_config.block_size, model.get_head_size())
    )
