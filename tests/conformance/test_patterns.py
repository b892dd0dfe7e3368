from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport_conformance.patterns import (
    Expected,
    Overlay,
    Pattern,
    expected,
    mismatch,
    pattern,
)

KINDS = st.sampled_from(["coded", "random", "const", "nan"])
BLANK = Pattern("const", 0xEE)


@given(KINDS, st.integers(0, 255), st.integers(0, 5000), st.integers(0, 300))
def test_any_range_is_a_slice_of_the_whole(kind, key, offset, nbytes):
    one = Pattern(kind, key)
    whole = one.data(0, offset + nbytes)
    assert np.array_equal(one.data(offset, nbytes), whole[offset:])
    assert np.array_equal(pattern(one.wire()).data(offset, nbytes), whole[offset:])


def test_keys_give_different_bytes():
    a, b = (Pattern("coded", key).data(0, 4096) for key in (1, 2))
    assert not np.array_equal(a, b)
    assert np.isnan(Pattern("nan", 1).data(0, 4096).view("<f8")).all()


def whole(key=1, nbytes=4096):
    return Expected(BLANK, (Overlay(Pattern("coded", key), (0,), (0,), (nbytes,)),))


def test_equal_contents_are_no_mismatch():
    want = whole()
    assert mismatch(want.data(8192), want) == ""
    assert mismatch(want.data(8192), expected(want.wire())) == ""


def test_a_missing_tail_is_named():
    buffer = whole().data(8192)
    buffer[4095] = 0xEE
    text = mismatch(buffer, whole())
    assert "byte 4095 of 4096 of descriptor 0" in text
    assert "never arrived" in text


def test_an_overrun_is_named():
    buffer = whole().data(8192)
    buffer[4096] = 0x11
    text = mismatch(buffer, whole())
    assert "outside every range" in text
    assert "corrupted" in text


def test_zeros_are_named():
    buffer = whole().data(8192)
    buffer[100:200] = 0
    assert "they are zero" in mismatch(buffer, whole())


@pytest.mark.parametrize("shift", [0, 3])
def test_misplaced_data_is_told_from_corruption(shift):
    buffer = whole().data(8192)
    buffer[64:128] = Pattern("coded", 7).data(512 + shift, 64)
    text = mismatch(buffer, whole())
    assert f"pattern 7 at byte {512 + shift}" in text
    assert "misplaced, not corrupted" in text
