"""What the router counts.  Units and scope are in the names; labels are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvtransport_vllm.router.engines import Engine, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAST_S = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """All counters of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by how they ended.", "path", "outcome")
        self.legs = self._counter(
            "legs", "Requests to engines by how they ended.", "leg", "engine", "outcome"
        )
        self.affinity = self._counter(
            "affinity", "Affinity lookups by the source that matched.", "source", "result"
        )
        self.conflicts = self._counter(
            "affinity_conflicts", "Two sources named different conversations.", "used", "ignored"
        )
        self.ids_ignored = self._counter(
            "ids_ignored", "Conversation ids that were not usable.", "source", "reason"
        )
        self.failovers = self._counter("failovers", "Legs tried again on another engine.", "leg")
        self.prefill_skipped = self._counter(
            "prefill_skipped", "Requests answered without a prefill leg's KV.", "reason"
        )
        self.store_errors = self._counter(
            "affinity_store_errors", "Shared store operations failed or skipped.", "operation"
        )
        self.added_latency = self._histogram(
            "added_latency_seconds",
            "The router's own time before the first byte: total less waiting for engines.",
            _FAST_S,
        )
        self.prefill_seconds = self._histogram(
            "prefill_leg_seconds", "Prefill legs that succeeded.", _SLOW_S
        )
        self.first_byte = self._histogram(
            "first_byte_seconds", "Request received to first byte sent.", _SLOW_S
        )

    def watch(
        self,
        engines: Sequence[Engine],
        in_flight: Callable[[], int],
        bindings: Callable[[], int],
    ) -> None:
        """Show these as gauges whenever somebody asks."""
        self.registry.register(_Gauges(engines, in_flight, bindings))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvt_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"kvt_router_{name}", text, buckets=tuple(buckets), registry=self.registry)


class _Gauges(Collector):
    def __init__(
        self,
        engines: Sequence[Engine],
        in_flight: Callable[[], int],
        bindings: Callable[[], int],
    ) -> None:
        self._engines = engines
        self._in_flight = in_flight
        self._bindings = bindings

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("role", "engine")
        up = GaugeMetricFamily("kvt_router_engine_up", "1 when it takes traffic.", labels=labels)
        busy = GaugeMetricFamily(
            "kvt_router_engine_in_flight", "Requests reserved or under way.", labels=labels
        )
        for engine in self._engines:
            up.add_metric((engine.role, engine.name), float(engine.state is State.UP))
            busy.add_metric((engine.role, engine.name), engine.in_flight)
        yield up
        yield busy
        yield GaugeMetricFamily(
            "kvt_router_in_flight", "Client requests under way.", value=self._in_flight()
        )
        yield GaugeMetricFamily(
            "kvt_router_affinity_bindings", "Bindings in this process.", value=self._bindings()
        )
