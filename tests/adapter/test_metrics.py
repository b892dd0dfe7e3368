"""What is counted is declared, what is declared can be registered, dashboards name real series."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from kvtransport_vllm import metrics
from kvtransport_vllm.stats import TransportStats, series, split_series

ROOT = Path(__file__).parents[2]
DECLARED = {item.name for item in (*metrics.COUNTERS, *metrics.GAUGES, *metrics.HISTOGRAMS)}


class Recorder:
    """Stands for a Prometheus class: keeps what it is told."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.children = {}

    def labels(self, *values):
        return self.children.setdefault(values, Child())


class Child:
    def __init__(self):
        self.value = 0.0
        self.seen = []

    def inc(self, amount):
        self.value += amount

    def set(self, value):
        self.value = value

    def observe(self, value):
        self.seen.append(value)


class Config:
    kv_transfer_config = None


def prom():
    kinds = dict.fromkeys((Counter, Gauge, Histogram), Recorder)
    return metrics.TransportMetrics(Config(), kinds, ["model_name"], {0: ["m"], 1: ["m"]})


def test_stats_reach_their_series():
    stats = TransportStats()
    stats.count(series("kvtransport_attempts_total", direction="decode_to_prefill"))
    stats.gauge("kvtransport_leases", 3)
    stats.observe(series("kvtransport_pull_seconds", direction="decode_to_prefill"), 0.25)
    more = TransportStats()
    more.count(series("kvtransport_attempts_total", direction="decode_to_prefill"), 2)
    stats.aggregate(more)
    found = prom()
    found.observe(stats.to_dict(), 1)
    registered = found._metrics
    attempts = registered["kvtransport_attempts_total"].children
    assert attempts["m", "decode_to_prefill"].value == 3
    assert registered["kvtransport_leases"].children["m",].value == 3
    pulls = registered["kvtransport_pull_seconds"].children
    assert pulls["m", "decode_to_prefill"].seen == [0.25]


def test_undeclared_series_is_dropped(caplog):
    stats = TransportStats()
    stats.count("kvtransport_invented_total")
    prom().observe(stats.to_dict())
    assert "kvtransport_invented_total" in caplog.text


def test_every_declared_series_gets_its_values_somewhere():
    """A series that nobody counts looks like a zero."""
    source = (ROOT / "vllm_adapter/telemetry.py").read_text()
    assert {name for name in DECLARED if f'"{name}"' not in source} == set()


def test_series_keys_survive_the_way():
    key = series("name", direction="a", outcome="b")
    assert split_series(key) == ("name", {"direction": "a", "outcome": "b"})


def test_dashboard_and_guide_name_real_series():
    for path in ("examples/grafana/kvtransport.json", "docs/operating.md"):
        named = set(re.findall(r"kvtransport_[a-z_]+", (ROOT / path).read_text()))
        named = {name.removesuffix("_bucket") for name in named} - {"kvtransport_vllm"}
        assert named <= DECLARED, f"{path}: {named - DECLARED}"


def test_dashboard_is_valid():
    board = json.loads((ROOT / "examples/grafana/kvtransport.json").read_text())
    assert all(panel["targets"] for panel in board["panels"])
