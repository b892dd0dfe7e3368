"""``cost_model``: pull when pulling is predicted to be faster than computing."""

from __future__ import annotations

from kvtransport.policy.recompute import Threshold


class CostModel(Threshold):
    """First cut: the threshold that applies without data."""
