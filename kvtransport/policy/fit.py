"""Robust fits of "time = sum of non-negative rates x quantities" to noisy samples.

Relative errors count, so that short and long samples weigh the same, and they
count less the larger they are, so that a stalled transfer or a step that waited
for something else does not move the rates.  A rate is never negative: an
impossible one is left out and the others fitted again.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]

USUAL_ERROR = 0.25
"""Relative error that single transfers and steps commonly have."""

_ROUNDS = 8


def fit(quantities: Rows, seconds: Rows, *, usual_error: float = USUAL_ERROR) -> Rows:
    """Rates, one per column of ``quantities`` (n x k), for measured ``seconds`` (n).

    ``k`` is at most 3 or so: every subset of columns is tried.  With fewer
    samples than columns, or samples all alike, the split between columns is
    arbitrary, but predictions for similar quantities are good.  Samples that are
    off by more than ``usual_error`` count less; ``inf`` takes all as they are.
    """
    columns = quantities.shape[1]
    if not len(seconds):
        return np.zeros(columns)
    predicted = _typical(quantities, seconds)
    rates = np.zeros(columns)
    for _ in range(_ROUNDS):
        # In proportion to the larger of the two, neither a stall nor a time that
        # is too good to be true gets more than its vote.
        size = np.maximum(seconds, predicted)
        off = np.log(np.maximum(predicted, 1e-12) / seconds) / usual_error
        rates = _non_negative(quantities / size[:, None], seconds / size, 1.0 / (1.0 + off * off))
        predicted = quantities @ rates
    return rates


def _typical(quantities: Rows, seconds: Rows) -> Rows:
    """A first prediction that outliers have no say in: the median speed for all."""
    total = (quantities / np.maximum(quantities.mean(axis=0), 1e-300)).sum(axis=1)
    total = np.maximum(total, 1e-300)
    return np.asarray(np.median(seconds / total) * total)


def _non_negative(scaled: Rows, target: Rows, weights: Rows) -> Rows:
    """Weighted least squares of ``scaled @ rates = target``, without negative rates.

    The sum of squares is convex: when all columns together fit without a negative
    rate, nothing is better.  Else every subset of them is tried.
    """
    columns = scaled.shape[1]
    size = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    unit = scaled / size
    weighted = (unit * weights[:, None]).T
    gram, right = weighted @ unit, weighted @ target
    best, least = np.zeros(columns), 0.0
    for count in range(columns, 0, -1):
        for chosen in map(list, combinations(range(columns), count)):
            part = gram[np.ix_(chosen, chosen)]
            # A trace of ridge keeps columns that always move together solvable.
            part = part + np.eye(count) * 1e-9 * max(float(np.trace(part)), 1e-300)
            rates = np.linalg.solve(part, right[chosen])
            if (rates < 0).any():
                continue
            if count == columns:
                return np.asarray(rates / size)
            loss = rates @ gram[np.ix_(chosen, chosen)] @ rates - 2 * rates @ right[chosen]
            if loss < least - 1e-12:
                best, least = np.zeros(columns), float(loss)
                best[chosen] = rates
    return np.asarray(best / size)
