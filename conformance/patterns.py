"""Test patterns whose every byte follows from its position, and their diagnosis.

A pattern can be produced for any byte range, so two processes agree on contents
by exchanging a key instead of the data.  ``coded`` words name their own buffer
and position, which tells misplacement from corruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_INDEX_BITS = 48
_INDEX_MASK = (1 << _INDEX_BITS) - 1


@dataclass(frozen=True, slots=True)
class Pattern:
    """``coded``: key and word index; ``random``: hash of both; ``const``: one byte; ``nan``.

    ``key`` is below 2**15; for ``const`` it is the byte.
    """

    kind: Literal["coded", "random", "const", "nan"]
    key: int

    def data(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes ``offset .. offset + nbytes`` of the pattern."""
        if self.kind == "const":
            return np.full(nbytes, self.key, np.uint8)
        first = offset // 8
        words = np.arange(first, (offset + nbytes + 7) // 8, dtype=np.uint64)
        raw = self._words(words).astype("<u8", copy=False).view(np.uint8)
        skip = offset - first * 8
        return raw[skip : skip + nbytes]

    def _words(self, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # The lowest key bit is always set in a word, so that no word is zero.
        tagged = np.uint64((self.key * 2 + 1) << _INDEX_BITS) | index
        if self.kind == "coded":
            return tagged
        if self.kind == "nan":
            return np.uint64(0x7FF0_0000_0000_0001) | (_mix(tagged) >> np.uint64(12))
        return _mix(tagged)

    def wire(self) -> list[Any]:
        return [self.kind, self.key]


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of splitmix64: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        mixed = words * np.uint64(0x9E37_79B9_7F4A_7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        return mixed ^ (mixed >> np.uint64(31))


def pattern(wire: Sequence[Any]) -> Pattern:
    """Read what ``Pattern.wire`` wrote."""
    return Pattern(wire[0], int(wire[1]))


@dataclass(frozen=True, slots=True)
class Overlay:
    """Ranges that must hold another pattern: vectors of equal length, in bytes."""

    pattern: Pattern
    at: tuple[int, ...]
    source: tuple[int, ...]
    nbytes: tuple[int, ...]

    def wire(self) -> list[Any]:
        return [self.pattern.wire(), list(self.at), list(self.source), list(self.nbytes)]


def overlay(wire: Sequence[Any]) -> Overlay:
    """Read what ``Overlay.wire`` wrote."""
    return Overlay(pattern(wire[0]), tuple(wire[1]), tuple(wire[2]), tuple(wire[3]))


@dataclass(frozen=True, slots=True)
class Expected:
    """Contents of a whole buffer: a background and what was written over it."""

    background: Pattern
    overlays: tuple[Overlay, ...] = ()

    def data(self, nbytes: int) -> Bytes:
        out = np.array(self.background.data(0, nbytes))
        for layer in self.overlays:
            for at, source, count in zip(layer.at, layer.source, layer.nbytes, strict=True):
                out[at : at + count] = layer.pattern.data(source, count)
        return out

    def wire(self) -> list[Any]:
        return [self.background.wire(), [layer.wire() for layer in self.overlays]]


def expected(wire: Sequence[Any]) -> Expected:
    """Read what ``Expected.wire`` wrote."""
    return Expected(pattern(wire[0]), tuple(overlay(layer) for layer in wire[1]))


def mismatch(actual: Bytes, want: Expected) -> str:
    """Compare a buffer with what it must hold; return "" or a pointing message."""
    reference = want.data(len(actual))
    if np.array_equal(actual, reference):
        return ""
    wrong = np.flatnonzero(actual != reference)
    first, last = int(wrong[0]), int(wrong[-1])
    where = _place(want, first)
    return (
        f"{len(wrong)} of {len(actual)} bytes are wrong, the first at byte {first} ({where}), "
        f"the last at byte {last}; {_cause(actual, want, wrong)}"
    )


def _place(want: Expected, position: int) -> str:
    for layer in want.overlays:
        for index, (at, count) in enumerate(zip(layer.at, layer.nbytes, strict=True)):
            if at <= position < at + count:
                return f"byte {position - at} of {count} of descriptor {index}"
    return "outside every range named by the transfer"


def _cause(actual: Bytes, want: Expected, wrong: NDArray[np.intp]) -> str:
    """Say what the wrong bytes are instead: old contents, zeros or another place's data."""
    old = want.background.data(0, len(actual))
    if np.array_equal(actual[wrong], old[wrong]):
        return "they still hold their old contents: this data never arrived"
    if not actual[wrong].any():
        return "they are zero"
    found = _decode(actual, int(wrong[0]))
    if found is not None:
        key, offset = found
        return f"they hold the data of pattern {key} at byte {offset}: misplaced, not corrupted"
    return "they hold nothing this test wrote: corrupted"


def _decode(actual: Bytes, position: int) -> tuple[int, int] | None:
    """Read the coded word around ``position``; alignment follows from consecutive indices."""
    for start in range(max(0, position - 7), position + 8):
        if start + 16 > len(actual):
            break
        here, following = (int(word) for word in actual[start : start + 16].copy().view("<u8"))
        if following == here + 1 and (here >> _INDEX_BITS) & 1:
            key = here >> (_INDEX_BITS + 1)
            return key, (here & _INDEX_MASK) * 8 + position - start
    return None
