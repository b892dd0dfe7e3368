"""Counters and observations on their way from the engine to ``/metrics``.

vLLM carries one ``KVConnectorStats`` per step from the scheduler process to
its API server, where ``metrics.py`` turns them into Prometheus series.  The
payload is plain data: ``counters`` and ``gauges`` map a series key to a
number, ``samples`` maps one to a list of observations.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


def series(name: str, **labels: str) -> str:
    """``name|label=value|...``, labels in the order given."""
    return "|".join([name, *(f"{key}={value}" for key, value in labels.items())])


def split_series(key: str) -> tuple[str, dict[str, str]]:
    """Inverse of ``series``."""
    name, *labels = key.split("|")
    return name, dict(label.split("=", 1) for label in labels)


class TransportStats(KVConnectorStats):
    """What one interval counted; adding intervals loses nothing."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {"counters": {}, "gauges": {}, "samples": {}})

    def count(self, key: str, amount: float = 1) -> None:
        counters = self.data["counters"]
        counters[key] = counters.get(key, 0) + amount

    def gauge(self, key: str, value: float) -> None:
        self.data["gauges"][key] = value

    def observe(self, key: str, value: float) -> None:
        self.data["samples"].setdefault(key, []).append(value)

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "gauges": {}, "samples": {}}

    def aggregate(self, other: KVConnectorStats) -> TransportStats:
        for key, amount in other.data["counters"].items():
            self.count(key, amount)
        self.data["gauges"].update(other.data["gauges"])
        for key, values in other.data["samples"].items():
            self.data["samples"].setdefault(key, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth for vLLM's periodic log."""
        totals: dict[str, float] = defaultdict(float)
        for key, amount in self.data["counters"].items():
            name, labels = split_series(key)
            totals[".".join([name, *labels.values()])] += amount
        for key, values in self.data["samples"].items():
            totals[f"{split_series(key)[0]}_p50"] = statistics.median(values)
        return {key: round(value, 6) for key, value in totals.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())
