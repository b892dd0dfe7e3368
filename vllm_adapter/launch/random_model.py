"""A small Llama with random weights whose answers depend on every token it read.

For correctness tests and benchmarks: weights of ``--load-format dummy`` are so
small that the answer hardly depends on the history, so wrong KV would go
unseen.  These are large (``initializer_range`` 0.1) and the same everywhere
(fixed seed, made on the CPU).

The tokenizer has one token per byte plus a few special ones, so text and
tokens correspond one to one.  Output rows of special and of non-printable
tokens are zero, which greedy sampling never picks among 96 random logits: an
answer is always printable ASCII, never ends early, and gives the same tokens
when a later prompt repeats it as text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransport_vllm.launch.cache import cached

_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_PRINTABLE = frozenset(range(0x20, 0x7F)) | {0x0A}
_VOCABULARY = 320
_FORMAT = 1

_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModelSpec:
    """Geometry and seed; equal specs give byte-identical weights.

    ``hidden`` is divided among ``heads``; ``kv_heads`` must divide ``heads``.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    max_position: int = 8192
    seed: int = 0
    initializer_range: float = 0.1
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Folder name: readable geometry plus a digest of everything."""
        fields = json.dumps({**dataclasses.asdict(self), "format": _FORMAT}, sort_keys=True)
        digest = hashlib.blake2b(fields.encode(), digest_size=4).hexdigest()
        return f"random-{self.layers}x{self.hidden}-{digest}"


def prepare_random_model(spec: RandomModelSpec | None = None, *, cache: Path | None = None) -> Path:
    """The folder of a checkpoint and tokenizer that vLLM serves, built if needed.

    Takes a few seconds the first time; needs torch, transformers and tokenizers.
    """
    chosen = spec or RandomModelSpec()
    return cached(chosen.name, lambda folder: _build(chosen, folder), cache=cache)


def _build(spec: RandomModelSpec, folder: Path) -> None:
    tokenizer = _tokenizer()
    _model(spec, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=_SPECIAL[0], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _model(spec: RandomModelSpec, tokenizer: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=spec.hidden,
        intermediate_size=spec.hidden * 3,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.max_position,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = LlamaForCausalLM(config)
    silent = [token for token in range(_VOCABULARY) if token not in _PRINTABLE]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    return model.to(getattr(torch, spec.dtype))
