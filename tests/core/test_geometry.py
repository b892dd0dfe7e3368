"""KV geometry: sizes, tables, comparisons."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport.errors import ConfigError, IncompatiblePeerError, OutOfBoundsError
from kvtransport.layout.geometry import KVGeometry

LLAMA = KVGeometry(layers=80, total_kv_heads=8, head_size=128, block_tokens=16, dtype="bfloat16")


@dataclass
class Memory:
    region_id: int = 1
    name: str = "kv"
    nbytes: int = 1 << 40


def test_sizes():
    assert LLAMA.block_nbytes == 2 * 16 * 8 * 128 * 2
    split = replace(LLAMA, kv="split")
    assert split.block_nbytes * 2 == LLAMA.block_nbytes
    assert (split.tables_per_layer, LLAMA.tables_per_layer) == (2, 1)
    latent = replace(LLAMA, kv="latent", total_kv_heads=1, head_size=576)
    assert latent.block_nbytes == 16 * 576 * 2
    assert replace(latent, tp_size=4, tp_rank=3).block_nbytes == latent.block_nbytes
    assert replace(LLAMA, padding_nbytes=64).block_nbytes == LLAMA.block_nbytes + 64


def test_tables_tile_the_region():
    geometry = replace(LLAMA, kv="split", layers=3)
    tables = geometry.tables(Memory(), 10, base=100)
    size = geometry.block_nbytes
    assert [t.base for t in tables] == [100 + i * 10 * size for i in range(6)]
    assert all(t.dense and t.count == 10 for t in tables)
    with pytest.raises(OutOfBoundsError):
        geometry.tables(Memory(nbytes=60 * size), 10, base=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 81),
        ("total_kv_heads", 16),
        ("head_size", 64),
        ("block_tokens", 32),
        ("dtype", "float16"),
        ("kv", "split"),
        ("order", "head_major"),
        ("padding_nbytes", 8),
        ("tp_size", 2),
    ],
)
def test_each_fact_alone_is_named_with_both_values(field, value):
    other = replace(LLAMA, **{field: value})
    (difference,) = LLAMA.compare(other)
    assert difference.field == field
    ours = getattr(LLAMA, field)
    with pytest.raises(IncompatiblePeerError, match=f"{field}: ours {ours!r}, theirs {value!r}"):
        LLAMA.require_equal(other, "decode-0")


def test_equal_geometries_agree():
    assert LLAMA.compare(replace(LLAMA)) == ()
    LLAMA.require_equal(replace(LLAMA), "decode-0")


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_cover_all_heads(heads, size):
    ranks = [
        replace(LLAMA, total_kv_heads=heads, tp_size=size, tp_rank=r).heads for r in range(size)
    ]
    assert sorted({h for rank in ranks for h in rank}) == list(range(heads))
    assert len({len(rank) for rank in ranks}) == 1
    assert [rank.start for rank in ranks] == sorted(rank.start for rank in ranks)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"dtype": "float64"}, "dtype"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"padding_nbytes": -1}, "padding_nbytes"),
        ({"total_kv_heads": 8, "tp_size": 3}, "8 KV heads.*3 ranks"),
    ],
)
def test_impossible(values, word):
    with pytest.raises(ConfigError, match=word):
        replace(LLAMA, **values)
