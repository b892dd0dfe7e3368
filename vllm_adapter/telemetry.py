"""What the scheduler side counts, logs and records, once per event.

Counters go to vLLM's ``/metrics``; with ``turn_log`` set, one JSON line per
turn goes to a file.  Neither contains text, tokens or a plain conversation id.

vLLM asks for counts once per step, so an idle engine exports none: its gauges
stay those of its last step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvtransport.lease.holding import Purpose, Refusal
from kvtransport_vllm import outcomes
from kvtransport_vllm.stats import TransportStats, series
from kvtransport_vllm.turn_log import TurnLog
from kvtransport_vllm.turns import Phase, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtransport.lease.held import LookupResult
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

_LEDGER_SERIES = {
    purpose.inserted: series("kvtransport_holdings_added_total", purpose=purpose.value)
    for purpose in Purpose
} | {
    refusal.refused: series("kvtransport_holdings_refused_total", reason=refusal.value)
    for refusal in Refusal
}
"""The ledger's own counters that are exported by how much they have grown."""

_BEGINNING_TOKENS = 64

_GAUGES_S = 1.0
"""While the engine steps, gauges are never older than this."""


class Telemetry:
    """Counts for one engine.  Scheduler thread only."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._stats = TransportStats()
        self._taken_s = -math.inf
        self._ledger_seen: Counter[str] = Counter()
        self._log = TurnLog(engine.config.turn_log)

    # -- events ------------------------------------------------------------

    def refused_params(self, request_id: str, keys: Iterable[str]) -> None:
        for key in keys:
            self._stats.count(series("kvtransport_refused_params_total", key=key))
        logger.warning("request %s: unusable kv_transfer_params: %s", request_id, list(keys))

    def began(self, turn: Turn) -> None:
        """A turn asks for reuse.  It settles later, once, whatever happens."""
        self._stats.count(series("kvtransport_attempts_total", direction=turn.direction))

    @staticmethod
    def outcome_of_lookup(result: LookupResult) -> str:
        """Why a lookup found no lease."""
        if result.tail_mismatch:
            return outcomes.CONTENT_MISMATCH
        return _LOOKUP_OUTCOMES.get(result.reason, outcomes.HANDSHAKE)

    def looked_up(self, turn: Turn) -> None:
        """The lookup's answer is known, whatever it is."""
        self._stats.observe(
            series("kvtransport_lookup_seconds", direction=turn.direction), turn.lookup_s
        )
        if turn.lease is not None and turn.lease.diverged:
            self._stats.count(
                series("kvtransport_content_divergence_total", direction=turn.direction)
            )

    def settled(self, turn: Turn) -> None:
        direction = turn.direction
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
            if turn.predicted_pull_s > 0 and math.isfinite(turn.predicted_pull_s):
                self._stats.observe(
                    series("kvtransport_pull_predicted_ratio", direction=direction),
                    turn.predicted_pull_s / total,
                )

    def step_predicted(self, ratio: float) -> None:
        """A prefill step ended that the recompute policy had a price for."""
        self._stats.observe("kvtransport_compute_predicted_ratio", ratio)

    def turn_finished(self, turn: Turn) -> None:
        """The request is over; its turn has settled."""
        summary = turn.summary()
        # What an aborted request had left to compute was never computed.
        if turn.outcome != outcomes.ABORTED:
            for source in ("local", "pulled", "recomputed"):
                self._stats.count(
                    series("kvtransport_tokens_total", direction=turn.direction, source=source),
                    max(0, summary[f"{source}_tokens"]),
                )
        if self._log.wanted:
            self._log.write(self._record(turn))

    def _record(self, turn: Turn) -> dict[str, object]:
        report = turn.report
        return {
            "time": round(time.time(), 3),
            "engine": self._engine.identity.engine_id,
            "request": turn.request_id,
            "conversation": conversation_hash(turn),
            "conversation_from": "router" if turn.conversation else "guess",
            "direction": turn.direction,
            **turn.summary(),
            "planned_tokens": turn.planned_tokens,
            "decision": turn.decision,
            "predicted_pull_s": _seconds(turn.predicted_pull_s),
            "predicted_compute_s": _seconds(turn.predicted_compute_s),
            "lookup_s": _seconds(turn.lookup_s),
            "pull_s": _seconds(turn.pull_s if turn.loading_since_s else None),
            "transfer_s": _seconds(report.seconds if report else None),
            "detail": report.detail if report else "",
        }

    # -- what an interval yields -------------------------------------------

    def take(self, turns: Iterable[Turn]) -> TransportStats | None:
        """Counts since the last call with the gauges of now.

        None when nothing happened and the gauges are young enough.
        """
        self._count_holdings()
        now = self._clock()
        ages = [now - t.loading_since_s for t in turns if t.phase is Phase.LOADING]
        if self._stats.is_empty() and not ages and now - self._taken_s < _GAUGES_S:
            return None
        self._taken_s = now
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
        counters = self._engine.ledger.counters
        for counter, key in _LEDGER_SERIES.items():
            total = counters[counter]
            if grown := total - self._ledger_seen[counter]:
                self._ledger_seen[counter] = total
                self._stats.count(key, grown)

    def _gauges(self) -> None:
        engine = self._engine
        now = engine.ledger.gauges()
        gauge = self._stats.gauge
        gauge(series("kvtransport_holdings", purpose="retained"), now.retained)
        gauge(series("kvtransport_holdings", purpose="handoff"), now.handoffs)
        gauge("kvtransport_retained_blocks", now.retained_blocks)
        gauge("kvtransport_retained_bytes", now.retained_blocks * engine.block_nbytes)
        gauge("kvtransport_retention_budget_blocks", now.budget_blocks)
        gauge("kvtransport_leases", now.leases)
        gauge("kvtransport_quarantined_blocks", engine.held.quarantined_blocks)
        states = Counter(peer.state for peer in engine.control.peers())
        for state in PEER_STATES:
            gauge(series("kvtransport_peers", state=state), states[state])

    def close(self) -> None:
        self._log.close()


def _seconds(value: float | None) -> float | None:
    """For JSON, which has no NaN: what is not known is null."""
    return round(value, 6) if value is not None and math.isfinite(value) else None


def conversation_hash(turn: Turn) -> str:
    """A pseudonym for the conversation of one tenant, equal for all its turns.

    No engine knows conversations.  A router may pass its own key for this one;
    without it the prompt's beginning is a guess: conversations that begin alike
    get the same pseudonym, and one whose first prompt is shorter than the
    beginning gets another one from the second turn on.
    """
    request = turn.request
    identity: object = turn.conversation
    if not identity:
        length = min(_BEGINNING_TOKENS, request.num_prompt_tokens)
        identity = list(request.all_token_ids[:length])
    text = repr((request.cache_salt, identity))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
