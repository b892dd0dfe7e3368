"""Prometheus series on vLLM's own ``/metrics``, made from ``TransportStats``.

Every series is declared here with its unit in the name; a key that is not
declared is dropped with a log line, never invented on the fly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvtransport_vllm.stats import split_series

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

logger = logging.getLogger("kvtransport.vllm.metrics")

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Series:
    """One metric family: vLLM adds its engine labels in front of ``labels``."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


COUNTERS = (
    Series(
        "kvtransport_attempts_total",
        "Turns that asked for reuse; less kvtransport_outcomes_total: those under way.",
        ("direction",),
    ),
    Series(
        "kvtransport_outcomes_total", "Turns by how their reuse ended.", ("direction", "outcome")
    ),
    Series(
        "kvtransport_tokens_total",
        "Prompt tokens by where their KV came from.",
        ("direction", "source"),
    ),
    Series("kvtransport_pulled_bytes_total", "Bytes of KV read from peers.", ("direction",)),
    Series("kvtransport_descriptors_total", "Descriptors posted for these bytes.", ("direction",)),
    Series(
        "kvtransport_content_divergence_total",
        "Lookups in which a held conversation continues differently than the prompt.",
        ("direction",),
    ),
    Series("kvtransport_holdings_added_total", "Holdings entered.", ("purpose",)),
    Series("kvtransport_holdings_refused_total", "Holdings that retention refused.", ("reason",)),
    Series("kvtransport_holdings_dropped_total", "Holdings dropped.", ("purpose", "reason")),
    Series("kvtransport_refused_params_total", "Unusable kv_transfer_params values.", ("key",)),
)
GAUGES = (
    Series("kvtransport_holdings", "Holdings kept now.", ("purpose",)),
    Series("kvtransport_retained_blocks", "Distinct KV blocks of retained holdings."),
    Series("kvtransport_retained_bytes", "Bytes of these blocks, all ranks."),
    Series("kvtransport_retention_budget_blocks", "Blocks that retained holdings may take."),
    Series("kvtransport_leases", "Live leases granted to peers."),
    Series("kvtransport_quarantined_blocks", "Blocks kept out of use for safety."),
    Series("kvtransport_peers", "Peers by state of the control connection.", ("state",)),
    Series("kvtransport_oldest_pull_age_seconds", "Age of the oldest pull under way."),
)
HISTOGRAMS = (
    Series(
        "kvtransport_lookup_seconds",
        "From arrival to the lookup's answer, whatever it was.",
        ("direction",),
        _SECONDS,
    ),
    Series(
        "kvtransport_transfer_seconds",
        "Of one pull's slowest rank, posting to quiet.",
        ("direction",),
        _SECONDS,
    ),
    Series(
        "kvtransport_pull_seconds",
        "From allocation to the scheduler's knowledge of the end.",
        ("direction",),
        _SECONDS,
    ),
    Series(
        "kvtransport_pull_predicted_ratio",
        "Predicted over actual pull time.",
        ("direction",),
        _RATIO,
    ),
    Series(
        "kvtransport_compute_predicted_ratio",
        "Predicted over actual time of prefill steps.",
        (),
        _RATIO,
    ),
)


class TransportMetrics(KVConnectorPromMetrics):
    """Registers the series above with vLLM's labels and records into them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._labels: dict[str, tuple[str, ...]] = {}
        for kind, family in ((Counter, COUNTERS), (Gauge, GAUGES), (Histogram, HISTOGRAMS)):
            for item in family:
                extra: dict[str, Any] = {"buckets": item.buckets} if item.buckets else {}
                if kind is Gauge:
                    extra["multiprocess_mode"] = "mostrecent"
                make: Any = metric_types[kind]
                self._metrics[item.name] = make(
                    name=item.name,
                    documentation=item.help,
                    labelnames=[*labelnames, *item.labels],
                    **extra,
                )
                self._labels[item.name] = item.labels

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data["counters"].items():
            if (metric := self._child(key, engine_idx)) is not None:
                metric.inc(amount)
        for key, value in transfer_stats_data["gauges"].items():
            if (metric := self._child(key, engine_idx)) is not None:
                metric.set(value)
        for key, values in transfer_stats_data["samples"].items():
            if (metric := self._child(key, engine_idx)) is not None:
                for value in values:
                    metric.observe(value)

    def _child(self, key: str, engine_idx: int) -> Any:
        name, labels = split_series(key)
        metric = self._metrics.get(name)
        if metric is None or set(labels) != set(self._labels[name]):
            logger.error("series %s is not declared and was dropped", key)
            return None
        values = [labels[label] for label in self._labels[name]]
        return metric.labels(*self.per_engine_labelvalues[engine_idx], *values)
