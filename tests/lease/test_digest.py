from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport.errors import ConfigError
from kvtransport.lease.digest import DigestChain, chain_seed

SEED = chain_seed(b"fingerprint", tenant="tenant-a", lora="adapter")
TOKENS = [0, 1, 2**31, 2**32 - 1, *range(100, 136)]

GOLDEN = {
    "empty seed": "93401fb3ec6d9790ceaa5fa776d3cc39805d4819f731cfbcbe4ebdf756829a7c",
    "seed": "bbfbd342c5411af56fc56233015a669338681d4374ae8bcba789edf7b7f04343",
    "digests": "e1388c2f8a5c1b0190ae140a1380953e212ca56f2cac72edd2a789e2fe8e039b",
    "tail": "7841b6e08447a548193ccf2e674a5210",
    "extra digests": "e1388c2f8a5c1b0190ae140a1380953eff255b3718870c37bc5cf4f00898f04e",
    "extra tail": "e6e98a119a0705ecd9ed15e66a01e7ca",
    "groups of 8": "439ab8b7f8e99b40cc5879453b12b8ef",
}

tokens = st.lists(st.integers(0, 50), max_size=100)


def test_golden_seed() -> None:
    assert chain_seed(b"").hex() == GOLDEN["empty seed"]
    assert SEED.hex() == GOLDEN["seed"]


def test_golden_chain() -> None:
    chain = DigestChain.of(TOKENS, SEED)
    assert chain.digests.hex() == GOLDEN["digests"]
    assert chain.tail_digest(2, 8).hex() == GOLDEN["tail"]
    assert (chain.num_tokens, chain.groups, chain.tail_tokens) == (40, 2, 8)


def test_golden_extra() -> None:
    chain = DigestChain.of(TOKENS, SEED, extra=[(17, b"image"), (33, b"sound")])
    assert chain.digests.hex() == GOLDEN["extra digests"]
    assert chain.tail_digest(2, 8).hex() == GOLDEN["extra tail"]


def test_golden_group_size() -> None:
    assert DigestChain.of(TOKENS, SEED, group_tokens=8).digests[:16].hex() == GOLDEN["groups of 8"]


def test_chain_is_keyed_blake2b_over_whole_prefixes() -> None:
    """The format, written down a second time."""
    words = np.array(TOKENS, dtype="<u4").tobytes()
    chain = DigestChain.of(TOKENS, SEED)
    for group in (1, 2):
        state = hashlib.blake2b(words[: 64 * group], key=SEED, digest_size=16, person=b"kvt16")
        assert chain.digest(group) == state.digest()


@given(tokens, tokens, tokens)
def test_digests_agree_exactly_on_common_prefixes(
    common: list[int], a: list[int], b: list[int]
) -> None:
    one, two = DigestChain.of(common + a, SEED), DigestChain.of(common + b, SEED)
    shared = 0
    for x, y in zip(common + a, common + b, strict=False):
        if x != y:
            break
        shared += 1
    for group in range(1, min(one.groups, two.groups) + 1):
        assert (one.digest(group) == two.digest(group)) == (16 * group <= shared)


@given(tokens, st.data())
def test_tail_matches_exactly_the_same_tokens(base: list[int], data: st.DataObject) -> None:
    chain = DigestChain.of(base, SEED)
    group = data.draw(st.integers(0, chain.groups))
    length = data.draw(st.integers(0, 16))
    at = 16 * group
    digest = chain.tail_digest(group, length)
    if not 0 < length < 16 or at + length > len(base):
        assert digest == b""
        return
    longer = DigestChain.of(base[: at + length] + [7] * 20, SEED)
    assert longer.tail_digest(group, length) == digest
    edited = list(base[: at + length])
    edited[data.draw(st.integers(0, at + length - 1))] += 1
    assert DigestChain.of(edited, SEED).tail_digest(group, length) != digest


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80))
def test_lists_and_arrays_are_the_same(values: list[int]) -> None:
    from_list = DigestChain.of(values, SEED)
    for dtype in (np.uint32, np.int64):
        assert DigestChain.of(np.array(values, dtype=dtype), SEED).digests == from_list.digests


def test_every_identity_changes_every_digest() -> None:
    seeds = {
        chain_seed(b"f"),
        chain_seed(b"g"),
        chain_seed(b"f", tenant="t"),
        chain_seed(b"f", lora="t"),
        chain_seed(b"ft"),
        chain_seed(b"", tenant="f"),
    }
    assert len(seeds) == 6
    assert len({DigestChain.of(range(16), seed).digests for seed in seeds}) == 6
    assert len({DigestChain.of(range(32), SEED, group_tokens=n).digest(1) for n in (1, 8, 16)}) == 3


def test_extra_identity_counts_from_its_group_on() -> None:
    plain = DigestChain.of(range(64), SEED)
    image = DigestChain.of(range(64), SEED, extra=[(20, b"image")])
    assert image.digest(1) == plain.digest(1)
    for group in (2, 3, 4):
        assert image.digest(group) != plain.digest(group)
    variants = {
        DigestChain.of(range(64), SEED, extra=extra).digest(2)
        for extra in (
            [(20, b"image")],
            [(21, b"image")],
            [(20, b"imagf")],
            [(20, b"image"), (20, b"")],
            [(20, b"ima"), (20, b"ge")],
        )
    }
    assert len(variants) == 5


def test_extra_in_the_tail() -> None:
    plain = DigestChain.of(range(20), SEED)
    early = DigestChain.of(range(20), SEED, extra=[(16, b"image")])
    late = DigestChain.of(range(20), SEED, extra=[(19, b"image")])
    assert early.tail_digest(1, 2) != plain.tail_digest(1, 2)
    assert late.tail_digest(1, 2) == plain.tail_digest(1, 2)
    assert late.tail_digest(1, 4) != plain.tail_digest(1, 4)


def test_order_of_extras_does_not_matter() -> None:
    pairs = [(random.Random(i).randrange(60), b"%d" % i) for i in range(9)]
    chains = {
        DigestChain.of(range(64), SEED, extra=order).digests for order in (pairs, pairs[::-1])
    }
    assert len(chains) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [2**32]}, "tokens"),
        ({"tokens": ["a"]}, "tokens"),
        ({"tokens": np.array([-1])}, "tokens"),
        ({"tokens": np.array([0.5])}, "tokens"),
        ({"tokens": np.zeros((2, 2), dtype=np.int32)}, "tokens"),
        ({"tokens": [1], "seed": b"short"}, "seed"),
        ({"tokens": [1], "group_tokens": 0}, "group_tokens"),
        ({"tokens": [1], "extra": [(1, b"")]}, "extra"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], named: str) -> None:
    given_ = {"seed": SEED, **arguments}
    with pytest.raises(ConfigError, match=named):
        DigestChain.of(**given_)
