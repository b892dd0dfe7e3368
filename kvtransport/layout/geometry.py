"""KV geometry: the facts that give a block's bytes their meaning.

One value describes what one rank of one engine holds.  ``compare`` says which
facts two ranks disagree about, so that a refusal can name the field and both
values; ``tables`` turns a registered region into block tables.

Tensor parallelism: a rank holds ``heads`` of the model's ``total_kv_heads``.
With equal sizes rank r exchanges with rank r and whole blocks move.  Unequal
sizes need parts of blocks; ``heads`` is what that will be computed from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from kvtransport.errors import ConfigError, IncompatiblePeerError
from kvtransport.layout.blocks import BlockTable, Memory

_ITEM_NBYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

Arrangement: TypeAlias = Literal["joint", "split", "latent"]
"""K and V of a block together; in tables of their own; or one latent vector (MLA)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact on which two sides disagree."""

    field: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours!r}, theirs {self.theirs!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """What one rank's blocks look like; sizes in tokens, heads and elements.

    ``order`` tells which index runs faster inside a block: ``token_major`` is
    [token, head, element], ``head_major`` is [head, token, element].
    ``padding_nbytes`` are unused bytes at the end of each block of a table.
    Raises ``ConfigError`` for values that cannot be.
    """

    layers: int
    total_kv_heads: int
    head_size: int
    block_tokens: int
    dtype: str
    kv: Arrangement = "joint"
    order: Literal["token_major", "head_major"] = "token_major"
    padding_nbytes: int = 0
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "total_kv_heads", "head_size", "block_tokens", "tp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in _ITEM_NBYTES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; known: {sorted(_ITEM_NBYTES)}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank {self.tp_rank} is not in 0 .. {self.tp_size - 1}")
        if self.padding_nbytes < 0:
            raise ConfigError(f"padding_nbytes must not be negative, got {self.padding_nbytes}")
        heads, size = self.total_kv_heads, self.tp_size
        if self.kv != "latent" and heads % size and size % heads:
            raise ConfigError(
                f"{heads} KV heads cannot be shared by {size} ranks; one must divide the other"
            )

    @property
    def heads(self) -> range:
        """The model's KV heads that this rank holds.

        With more ranks than heads, consecutive ranks hold the same head; a
        latent cache is the same on every rank.
        """
        if self.kv == "latent":
            return range(self.total_kv_heads)
        if self.tp_size > self.total_kv_heads:
            head = self.tp_rank * self.total_kv_heads // self.tp_size
            return range(head, head + 1)
        count = self.total_kv_heads // self.tp_size
        return range(self.tp_rank * count, (self.tp_rank + 1) * count)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in one table."""
        parts = 2 if self.kv == "joint" else 1
        return parts * len(self.heads) * self.head_size * _ITEM_NBYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in one table, padding included."""
        return self.token_nbytes * self.block_tokens + self.padding_nbytes

    @property
    def tables_per_layer(self) -> int:
        """2 when K and V lie apart, else 1."""
        return 2 if self.kv == "split" else 1

    def tables(
        self, region: Memory, count: int, *, layers: int | None = None, base: int = 0
    ) -> tuple[BlockTable, ...]:
        """Block tables of ``layers`` (default: all) layers that follow each other.

        ``count`` blocks per table, layer by layer, K before V, from byte
        ``base`` of ``region``.  Raises ``OutOfBoundsError`` when the region is
        too small.
        """
        size = self.block_nbytes
        number = (self.layers if layers is None else layers) * self.tables_per_layer
        return tuple(
            BlockTable(region, base + i * count * size, size, size, count) for i in range(number)
        )

    def compare(self, other: KVGeometry) -> tuple[Difference, ...]:
        """Every fact on which blocks of the two ranks differ, or ``()``."""
        return tuple(
            Difference(field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )

    def require_equal(self, other: KVGeometry, peer: str) -> None:
        """Raise ``IncompatiblePeerError`` naming each differing fact and both values."""
        found = self.compare(other)
        if found:
            facts = "; ".join(map(str, found))
            raise IncompatiblePeerError(f"KV geometry of peer {peer!r} differs: {facts}", peer=peer)
