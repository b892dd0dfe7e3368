"""Robust fits of "time = sum of non-negative rates x quantities" to noisy samples.

Relative errors count, so that short and long samples weigh the same, and they
count less the larger they are (Huber), so that a stalled transfer or a step
that waited for something else does not move the rates.  A rate is never
negative: an impossible one is left out and the others fitted again.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]

_HUBER = 0.25
"""Relative error up to which a sample counts in full."""

_ROUNDS = 6


def fit(quantities: Rows, seconds: Rows) -> Rows:
    """Rates, one per column of ``quantities`` (n x k), for measured ``seconds`` (n).

    ``k`` is at most 3 or so: every subset of columns is tried.  With fewer
    samples than columns, or samples all alike, the split between columns is
    arbitrary, but predictions for similar quantities are good.
    """
    columns = quantities.shape[1]
    if not len(seconds):
        return np.zeros(columns)
    scaled = quantities / seconds[:, None]
    weights = _start(quantities, seconds)
    rates = np.zeros(columns)
    for _ in range(_ROUNDS):
        rates = _non_negative(scaled, weights)
        error = np.abs(scaled @ rates - 1.0)
        weights = np.where(error <= _HUBER, 1.0, _HUBER / np.maximum(error, _HUBER))
    return rates


def _start(quantities: Rows, seconds: Rows) -> Rows:
    """Begin near the typical sample: outliers must not get to choose the side."""
    total = (quantities / np.maximum(quantities.mean(axis=0), 1e-300)).sum(axis=1)
    speed = seconds / np.maximum(total, 1e-300)
    typical = np.median(speed)
    ratio = np.maximum(speed / typical, typical / speed)
    return np.asarray(1.0 / ratio)


def _non_negative(scaled: Rows, weights: Rows) -> Rows:
    """Weighted least squares of ``scaled @ rates = 1`` over all subsets of columns."""
    columns = scaled.shape[1]
    size = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    unit = scaled / size
    gram = (unit * weights[:, None]).T @ unit
    right = (unit * weights[:, None]).sum(axis=0)
    best, least = np.zeros(columns), 0.0
    for count in range(columns, 0, -1):
        for chosen in map(list, combinations(range(columns), count)):
            part = gram[np.ix_(chosen, chosen)]
            # A trace of ridge keeps columns that always move together solvable.
            part = part + np.eye(count) * 1e-9 * np.trace(part)
            rates = np.linalg.solve(part, right[chosen])
            if (rates < 0).any():
                continue
            loss = rates @ gram[np.ix_(chosen, chosen)] @ rates - 2 * rates @ right[chosen]
            if loss < least - 1e-12:
                best, least = np.zeros(columns), float(loss)
                best[chosen] = rates
    return np.asarray(best / size)
