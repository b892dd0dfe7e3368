"""From a vLLM request to the digest chain that identifies its KV.

Everything that changes KV enters the chain: tokens, tenant salt, LoRA adapter,
multimodal inputs.  vLLM's own list is ``generate_block_hash_extra_keys`` in
``vllm/v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtransport.lease.digest import DigestChain, chain_seed

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ContentIdentity:
    """Computes chains for one engine's requests; stateless but for the seed."""

    def __init__(self, fingerprint: bytes, group_tokens: int) -> None:
        self._fingerprint = fingerprint
        self._group_tokens = group_tokens

    @staticmethod
    def describable(request: Request) -> bool:
        """Whether tokens say all; prompt embeddings and pooling don't qualify."""
        return (
            request.prompt_embeds is None
            and getattr(request, "prompt_is_token_ids", None) is None
            and request.pooling_params is None
        )

    def chain(self, request: Request, tokens: Sequence[int]) -> DigestChain:
        """Digest ``tokens``, the first tokens of ``request``, at the time of use."""
        lora = request.lora_request
        seed = chain_seed(
            self._fingerprint,
            tenant=request.cache_salt or "",
            lora=f"{lora.lora_name}\0{lora.lora_path}" if lora is not None else "",
        )
        return DigestChain.of(
            tokens,
            seed,
            group_tokens=self._group_tokens,
            extra=_multimodal(request, len(tokens)),
        )


def _multimodal(request: Request, limit: int) -> list[tuple[int, bytes]]:
    """(token position, identity) of each input whose placeholder begins before ``limit``."""
    return [
        (feature.mm_position.offset, feature.identifier.encode())
        for feature in request.mm_features
        if feature.mm_position.offset < limit
    ]
