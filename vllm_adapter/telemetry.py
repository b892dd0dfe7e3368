"""What the scheduler side counts, logs and records, once per event.

Counters go to vLLM's ``/metrics``; with ``turn_log`` set, one JSON line per
turn goes to a file.  Neither contains text, tokens or a plain conversation id.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvtransport_vllm import outcomes
from kvtransport_vllm.stats import TransportStats, series
from kvtransport_vllm.turns import Phase, Turn

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from kvtransport_vllm.engine import Engine

logger = logging.getLogger("kvtransport.vllm.turns")

_LOOKUP_OUTCOMES = {
    "no_holding": outcomes.NO_HOLDING,
    "no_peer": outcomes.NO_PEER,
    "timeout": outcomes.LOOKUP_TIMEOUT,
    "refused": outcomes.LEASE_REFUSED,
    "incompatible": outcomes.INCOMPATIBLE,
}

PEER_STATES = ("connecting", "not_ready", "connected", "incompatible", "down")


class Telemetry:
    """Counts for one engine.  Scheduler thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stats = TransportStats()
        self._log: TextIO | None = None
        if engine.config.turn_log:
            self._log = open(engine.config.turn_log, "a", buffering=1)  # noqa: SIM115, PTH123

    # -- events ------------------------------------------------------------

    def refused_params(self, request_id: str, keys: Iterable[str]) -> None:
        for key in keys:
            self._stats.count(series("kvtransport_refused_params_total", key=key))
        logger.warning("request %s: unusable kv_transfer_params: %s", request_id, list(keys))

    @staticmethod
    def outcome_of_lookup(reason: str) -> str:
        return _LOOKUP_OUTCOMES.get(reason, outcomes.HANDSHAKE)

    def found(self, turn: Turn) -> None:
        self._stats.observe(
            series("kvtransport_lookup_seconds", direction=turn.direction), turn.lookup_s
        )
        if turn.lease is not None and turn.lease.diverged:
            self._stats.count(
                series("kvtransport_content_divergence_total", direction=turn.direction)
            )

    def settled(self, turn: Turn) -> None:
        direction = turn.direction
        self._stats.count(series("kvtransport_attempts_total", direction=direction))
        self._stats.count(
            series("kvtransport_outcomes_total", direction=direction, outcome=turn.outcome)
        )
        level = logging.WARNING if turn.outcome in outcomes.FAILURES else logging.DEBUG
        logger.log(level, "request %s: %s, %s", turn.request_id, direction, turn.outcome)
        if turn.outcome == outcomes.PULLED and turn.report is not None:
            report = turn.report
            count = self._stats.count
            count(series("kvtransport_pulled_bytes_total", direction=direction), report.nbytes)
            count(series("kvtransport_descriptors_total", direction=direction), report.descriptors)
            self._stats.observe(
                series("kvtransport_transfer_seconds", direction=direction), report.seconds
            )
            total = max(turn.pull_s, 1e-9)
            self._stats.observe(series("kvtransport_pull_seconds", direction=direction), total)
            if turn.predicted_pull_s and math.isfinite(turn.predicted_pull_s):
                self._stats.observe(
                    series("kvtransport_pull_predicted_ratio", direction=direction),
                    turn.predicted_pull_s / total,
                )

    def turn_finished(self, turn: Turn) -> None:
        summary = turn.summary()
        for source in ("local", "pulled", "recomputed"):
            self._stats.count(
                series("kvtransport_tokens_total", direction=turn.direction, source=source),
                max(0, summary[f"{source}_tokens"]),
            )
        if self._log is not None:
            self._log.write(json.dumps(self._record(turn)) + "\n")

    def _record(self, turn: Turn) -> dict[str, object]:
        report = turn.report
        return {
            "time": round(time.time(), 3),
            "engine": self._engine.identity.engine_id,
            "request": turn.request_id,
            "conversation": conversation_hash(turn),
            "direction": turn.direction,
            **turn.summary(),
            "planned_tokens": turn.planned_tokens,
            "lookup_s": round(turn.lookup_s, 6),
            "transfer_s": round(report.seconds, 6) if report else 0.0,
            "detail": report.detail if report else "",
        }

    # -- what an interval yields -------------------------------------------

    def take(self, turns: Iterable[Turn]) -> TransportStats | None:
        """Counts since the last call with the gauges of now; None when nothing happens."""
        self._count_holdings()
        now = time.monotonic()
        ages = [now - t.loading_since_s for t in turns if t.phase is Phase.LOADING]
        if self._stats.is_empty() and not ages:
            return None
        self._gauges()
        self._stats.gauge("kvtransport_oldest_pull_age_seconds", max(ages, default=0.0))
        stats, self._stats = self._stats, TransportStats()
        return stats

    def _count_holdings(self) -> None:
        held = self._engine.held
        dropped, held.dropped = held.dropped, []
        for item in dropped:
            self._stats.count(
                series(
                    "kvtransport_holdings_dropped_total",
                    purpose=item.holding.purpose.value,
                    reason=item.reason.value,
                )
            )

    def holding(self, purpose: str, *, refused: str = "") -> None:
        if refused:
            self._stats.count(series("kvtransport_holdings_refused_total", reason=refused))
        else:
            self._stats.count(series("kvtransport_holdings_added_total", purpose=purpose))

    def _gauges(self) -> None:
        engine = self._engine
        now = engine.ledger.snapshot()
        gauge = self._stats.gauge
        gauge(series("kvtransport_holdings", purpose="retained"), now["retained"])
        gauge(series("kvtransport_holdings", purpose="handoff"), now["handoffs"])
        gauge("kvtransport_retained_blocks", now["retained_blocks"])
        gauge("kvtransport_retained_bytes", now["retained_nbytes"])
        gauge("kvtransport_retention_budget_blocks", now["budget_blocks"])
        gauge("kvtransport_leases", now["leases"])
        gauge("kvtransport_quarantined_blocks", engine.held.quarantined_blocks)
        states = Counter(peer.state for peer in engine.control.peers())
        for state in PEER_STATES:
            gauge(series("kvtransport_peers", state=state), states[state])

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def conversation_hash(turn: Turn) -> str:
    """A pseudonym that is equal for the turns of one conversation of one tenant."""
    beginning = repr((turn.request.cache_salt, turn.request.all_token_ids[:64]))
    return hashlib.blake2b(beginning.encode(), digest_size=8).hexdigest()
