"""How likely is it that a conversation comes back, and when: learned, not assumed.

Architecture
    Think times are collected in bins that double in width every two steps.  Per
    bin the model knows how many conversations came back in it and how many were
    still waiting ("at risk"); a holding that was dropped before anybody came
    back counts as waiting up to its age and not longer, so giving up early does
    not look like nobody returning.  The ratio is the bin's hazard
    (Kaplan-Meier); from hazards follows the chance of a return between two ages.

    Conversations that came back before come back more often, so first, second
    and later turns are learned apart.  Old observations fade: when a class has
    ``MEMORY`` of them, all count half.

Threading
    None of its own; the ledger's lock covers it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = 3
"""First turn, second turn, later turns."""

MEMORY = 4096.0
"""Observations of a class after which the old ones fade."""

_FIRST_S = 0.5
_BINS = 42
_EDGES = _FIRST_S * 2.0 ** (np.arange(_BINS - 1) / 2)
_PRIOR_HAZARD = 0.04
_PRIOR_WEIGHT = 8.0
_REFRESH = 256


def class_of(turns: int) -> int:
    """The class of a conversation that has come back ``turns`` times."""
    return turns if turns < CLASSES else CLASSES - 1


def position(age_s: float) -> float:
    """The age on the scale of bins: the whole part is the bin."""
    if age_s > _FIRST_S:
        at = 1.0 + 2.0 * math.log2(age_s / _FIRST_S)
        return at if at < _BINS else _BINS - 1e-9
    return age_s / _FIRST_S if age_s > 0 else 0.0


class _Class:
    """Observations and hazards of one class."""

    __slots__ = ("_hazard", "_new_left", "_new_returned", "_wanted", "left", "returned")

    def __init__(self) -> None:
        self.returned = np.zeros(_BINS)
        self.left = np.zeros(_BINS)
        self._new_returned: list[float] = []
        self._new_left: list[float] = []
        self._wanted = 1
        self._hazard = self._cumulated()

    def returns(self, age_s: float) -> None:
        self._new_returned.append(age_s)
        if len(self._new_returned) >= self._wanted:
            self.learn()

    def lapses(self, age_s: float) -> None:
        self._new_left.append(age_s)
        if len(self._new_left) >= self._wanted:
            self.learn()

    @property
    def total(self) -> float:
        return float(self.returned.sum() + self.left.sum())

    def learn(self) -> None:
        """Take what was observed into account, and let what is old fade."""
        self.returned += _binned(self._new_returned)
        self.left += _binned(self._new_left)
        self._new_returned.clear()
        self._new_left.clear()
        if self.total >= MEMORY:
            self.returned /= 2
            self.left /= 2
        self._hazard = self._cumulated()
        # The first observations count at once, later ones in batches.
        self._wanted = min(_REFRESH, 1 + int(self.total / 16))

    def _cumulated(self) -> list[float]:
        """Cumulated hazard at the lower edge of each bin, and at the end."""
        hazards = []
        at_risk = 0.0
        counts = zip(self.returned.tolist(), self.left.tolist(), strict=True)
        for back, gone in reversed(list(counts)):
            # Who left in a bin was at risk for half of it on average.
            exposed = at_risk + back + gone / 2
            chance = (back + _PRIOR_HAZARD * _PRIOR_WEIGHT) / (exposed + _PRIOR_WEIGHT)
            hazards.append(-math.log1p(-min(chance, 0.999)))
            at_risk += back + gone
        total, cumulated = 0.0, [0.0]
        for hazard in reversed(hazards):
            total += hazard
            cumulated.append(total)
        return cumulated

    def hazard(self, age_s: float) -> float:
        """Cumulated hazard up to this age; never falls with age."""
        at = position(age_s)
        low = int(at)
        below = self._hazard[low]
        return below + (self._hazard[low + 1] - below) * (at - low)


class ReturnModel:
    """The chance of a return by class, age and time left."""

    def __init__(self) -> None:
        self._classes = [_Class() for _ in range(CLASSES)]

    def returned(self, turns: int, age_s: float) -> None:
        """A conversation came back after this think time."""
        self._classes[class_of(turns)].returns(age_s)

    def lapsed(self, turns: int, age_s: float) -> None:
        """A holding was dropped at this age before anybody came back."""
        self._classes[class_of(turns)].lapses(age_s)

    def chance(self, turns: int, age_s: float, left_s: float) -> float:
        """That it comes back within ``left_s``, having stayed away for ``age_s``."""
        known = self._classes[class_of(turns)]
        return -math.expm1(known.hazard(age_s) - known.hazard(age_s + max(0.0, left_s)))

    def describe(self, ttl_s: float) -> dict[str, Any]:
        """Plain values for status pages."""
        for known in self._classes:
            known.learn()
        names = ("first_turn", "second_turn", "later_turns")
        return {
            name: {
                "observations": round(known.total, 1),
                "chance_within_ttl": round(self.chance(turns, 0.0, ttl_s), 3),
                "median_think_s": _median(known.returned),
            }
            for turns, (name, known) in enumerate(zip(names, self._classes, strict=True))
        }


def _binned(ages_s: list[float]) -> NDArray[np.intp]:
    """How many of the ages are in each bin."""
    return np.bincount(np.searchsorted(_EDGES, ages_s, side="right"), minlength=_BINS)


def _median(returned: NDArray[np.float64]) -> float | None:
    """Upper edge of the bin that holds the median of the observed think times."""
    seen = np.cumsum(returned)
    if not seen[-1]:
        return None
    at = int(np.searchsorted(seen, seen[-1] / 2))
    return round(_FIRST_S * math.exp2(at / 2), 1)
