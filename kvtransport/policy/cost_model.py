"""``cost_model``: pull when pulling gets the request computed sooner.

Architecture
    A pull takes ``fixed + per descriptor x descriptors + bytes / bandwidth``,
    the bytes already queued at the same peer included.  Computing takes
    ``per step + linear + quadratic`` in tokens, scaled by how much slower than
    usual this engine's latest steps were.  Before either can end, the prompt
    tokens that wait in front of the request are computed; a pull runs meanwhile,
    so on a busy engine pulls pay earlier than on an idle one.

    All rates are fitted to this engine's own transfers and steps (``fit``),
    transfers per peer as soon as there are enough.  First contact between two
    peers costs more than it ever will again and is kept apart.  Without usable
    rates the fixed threshold decides.

Threading
    ``decide`` and the observations come from the scheduler's thread; ``describe``
    may come from another one.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtransport.config import decode
from kvtransport.errors import ConfigError
from kvtransport.policy.calibration import VERSION, CalibrationFile, State
from kvtransport.policy.fit import fit
from kvtransport.policy.options import require_range
from kvtransport.policy.rates import ComputeRates, PullRates, break_even_tokens
from kvtransport.policy.recompute import (
    Decision,
    PullQuestion,
    RecomputePolicy,
    Threshold,
    ThresholdOptions,
)
from kvtransport.policy.samples import Sample, Samples, usable

logger = logging.getLogger("kvtransport.policy.cost_model")

MAX_PEERS = 256
_REFIT_S = 1.0
_SAVE_S = 60.0
_LOAD_STEPS = 16
_LOAD_FORGET_S = 5.0
_EXPLORE_COST = 3.0
_EXPLORE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions(ThresholdOptions):
    """Settings of ``cost_model``.

    The thresholds decide while nothing is known.  A pull must be done within
    ``margin`` times the time of computing; on a decode engine, where computing
    delays everybody's next token, within ``handoff_margin`` times.  ``min_transfers`` and
    ``min_steps`` are needed before a fit counts.  A peer that nothing is known of,
    or from which nothing was pulled for ``explore_after_s``, gets one pull that
    does not cost much, because otherwise a bad estimate would never be corrected
    (0: never).

    ``state_file`` keeps what was learned; ``state_identity`` says of which
    engine, so that another model does not start with it.

    The rates are used until there are measurements; 0 means unknown.
    """

    margin: float = 1.0
    handoff_margin: float = 4.0
    min_transfers: int = 5
    min_steps: int = 8
    explore_after_s: float = 600.0
    state_file: str = ""
    state_identity: str = ""
    pull_fixed_s: float = 0.0
    pull_descriptor_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    compute_step_s: float = 0.0
    compute_token_s: float = 0.0
    compute_pair_s: float = 0.0

    def __post_init__(self) -> None:
        # Named explicitly: super() does not find its class in a slotted dataclass.
        ThresholdOptions.__post_init__(self)
        require_range("margin", self.margin, 0.01, 100)
        require_range("handoff_margin", self.handoff_margin, 0.01, 1e6)
        require_range("min_transfers", self.min_transfers, 1, 10_000)
        require_range("min_steps", self.min_steps, 1, 10_000)
        require_range("explore_after_s", self.explore_after_s, 0, 7 * 86400)
        if len(self.state_identity) > 4096:
            raise ConfigError("state_identity must have at most 4096 characters")

    def pull_rates(self) -> PullRates:
        speed = self.pull_bytes_per_s
        return PullRates(
            fixed_s=self.pull_fixed_s,
            descriptor_s=self.pull_descriptor_s,
            byte_s=1.0 / speed if speed else math.nan,
        )

    def compute_rates(self) -> ComputeRates:
        return ComputeRates(
            step_s=self.compute_step_s,
            token_s=self.compute_token_s,
            pair_s=self.compute_pair_s,
        )

    def unusable(self) -> list[str]:
        """Names of rates that were given and can't be used, alone or with the others."""
        names = []
        if not self.pull_rates().usable:
            names += ["pull_fixed_s", "pull_descriptor_s", "pull_bytes_per_s"]
        if not self.compute_rates().usable:
            names += ["compute_step_s", "compute_token_s", "compute_pair_s"]
        return [name for name in names if getattr(self, name)]


class _Pulls:
    """Transfers from one peer, or from all, and the rates fitted to them."""

    def __init__(self, last_s: float = -math.inf) -> None:
        self.samples = Samples()
        self.first_contacts = 0
        self.first_contact_s = math.nan
        self.rates: PullRates | None = None
        self.last_s = last_s
        self.explore_until_s = -math.inf
        self.error = math.nan
        self._fitted_s = -math.inf
        self._fitted_total = 0

    def current(self, now: float, least: int) -> PullRates | None:
        """Rates, fitted again when there is news and some time has passed."""
        if self.samples.total < least:
            return None
        if self.samples.total != self._fitted_total and now - self._fitted_s >= _REFIT_S:
            fixed, descriptor, byte = map(float, fit(*self.samples.table()))
            rates = PullRates(fixed_s=fixed, descriptor_s=descriptor, byte_s=byte)
            self.rates = rates if rates.usable else None
            self._fitted_s, self._fitted_total = now, self.samples.total
        return self.rates

    def observe(self, sample: Sample, now: float, rates: PullRates | None) -> None:
        """Learn from a transfer; ``rates`` are those it was predicted with."""
        if rates is not None:
            predicted = rates.seconds(descriptors=sample.first, nbytes=sample.second)
            off = abs(math.log(max(predicted, 1e-9) / sample.seconds))
            self.error = off if math.isnan(self.error) else self.error + (off - self.error) / 16
        self.samples.add(sample)
        self.last_s = now

    def describe(self) -> dict[str, Any]:
        return {
            "transfers": self.samples.total,
            "first_contacts": self.first_contacts,
            "last_first_contact_s": _shown(self.first_contact_s),
            "rates": asdict(self.rates) if self.rates else None,
            "typical_error": None if math.isnan(self.error) else round(math.expm1(self.error), 3),
        }


class CostModel(RecomputePolicy):
    """See the module."""

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = decode(CostOptions, config or {}, where="recompute_config")
        self.rejected = 0
        self._clock = clock
        self._threshold = Threshold(
            {
                "kv_recompute_threshold": self.options.kv_recompute_threshold,
                "handoff_threshold": self.options.handoff_threshold,
            }
        )
        self._all = _Pulls()
        self._peers: OrderedDict[str, _Pulls] = OrderedDict()
        self._steps = Samples()
        self._compute: ComputeRates | None = None
        self._compute_at = (-math.inf, 0)
        self._chunk_tokens = 0
        self._slowness = 1.0
        self._last_step_s = -math.inf
        self._token_nbytes = 0.0
        self._token_descriptors = 0.0
        self._given_pull = self.options.pull_rates()
        self._given_compute = self.options.compute_rates()
        for name in self.options.unusable():
            value = getattr(self.options, name)
            logger.warning("rate not used, zero or absurd with the others: %s=%r", name, value)
        # With rates from the configuration no peer is unknown.
        self._known_since_s = clock() if self._given_pull.usable else -math.inf
        self._file = CalibrationFile(self.options.state_file, self.options.state_identity)
        self._saved_s = clock()
        self._restore()

    # -- decision -------------------------------------------------------------------

    def decide(self, question: PullQuestion, /) -> Decision:
        if question.tokens_beyond_local <= 0:
            return Decision(False, "nothing_to_pull")
        now = self._clock()
        pull, compute = self._pull_rates(question.peer, now), self._compute_rates(now)
        if pull is None or compute is None or question.nbytes <= 0:
            known = self._threshold.decide(question)
            return Decision(known.pull, f"uncalibrated_{known.reason}")
        self._token_nbytes = question.nbytes / question.tokens_beyond_local
        self._token_descriptors = question.descriptors / question.tokens_beyond_local
        pull_s = pull.seconds(
            nbytes=question.nbytes + max(0, question.queued_nbytes),
            descriptors=max(1, question.descriptors),
        )
        slowness = self._load(now)
        compute_s = slowness * compute.seconds(question.tokens_beyond_local, question.local_tokens)
        ahead = max(0, question.load_tokens)
        pairs = max(0.0, question.load_pairs)
        wait_s = slowness * compute.work_seconds(ahead, pairs) if ahead else 0.0
        # Both ways the tokens in front are computed first; the pull runs meanwhile
        # and then needs one step for the last token.
        pulled_s = max(pull_s, wait_s) + slowness * compute.step_s
        handoff = question.direction == "prefill_to_decode"
        margin = self.options.handoff_margin if handoff else self.options.margin
        chosen = pulled_s <= margin * (wait_s + compute_s)
        reason = "pull_sooner" if chosen else "compute_sooner"
        if not chosen and self._explore(question.peer, pull_s, compute_s, now):
            chosen, reason = True, "explore"
        return Decision(chosen, reason, pull_s, compute_s, wait_s)

    def _explore(self, peer: str, pull_s: float, compute_s: float, now: float) -> bool:
        after_s = self.options.explore_after_s
        if not after_s or pull_s > _EXPLORE_COST * compute_s:
            return False
        engine = _engine_of(peer)
        known = self._peers.get(engine) or self._peer(engine)
        if now - known.last_s >= after_s:
            # One pull for a while: the scheduler asks again until it has memory,
            # and ``pull_started`` ends the chance.
            known.last_s, known.explore_until_s = now, now + _EXPLORE_S
        return now < known.explore_until_s

    def pull_started(self, *, peer: str) -> None:
        known = self._peers.get(_engine_of(peer))
        if known is not None:
            known.explore_until_s = -math.inf

    def _pull_rates(self, peer: str, now: float) -> PullRates | None:
        least = self.options.min_transfers
        known = self._peers.get(_engine_of(peer))
        rates = known.current(now, least) if known else None
        rates = rates or self._all.current(now, least)
        if rates is None and self._given_pull.usable:
            rates = self._given_pull
        return rates

    def _compute_rates(self, now: float) -> ComputeRates | None:
        at, total = self._compute_at
        if self._steps.total >= self.options.min_steps:
            if self._steps.total != total and now - at >= _REFIT_S:
                step, token, pair = map(float, fit(*self._steps.table()))
                rates = ComputeRates(
                    step_s=step, token_s=token, pair_s=pair, chunk_tokens=self._chunk_tokens
                )
                self._compute = rates if rates.usable else None
                self._compute_at = now, self._steps.total
            if self._compute is not None:
                return self._compute
        return self._given_compute if self._given_compute.usable else None

    def _load(self, now: float) -> float:
        """How much slower than fitted the latest steps were; 1 when there were none lately."""
        return self._slowness if now - self._last_step_s < _LOAD_FORGET_S else 1.0

    def compute_seconds(self, tokens: int, /) -> float:
        rates = self._compute_rates(self._clock())
        return rates.seconds(tokens) if rates else 0.0

    def _break_even(self, pull: PullRates | None, compute: ComputeRates | None) -> int | None:
        """On an idle engine, with the latest question's bytes and descriptors per token."""
        if pull is None or compute is None or not self._token_nbytes:
            return None
        return break_even_tokens(
            pull,
            compute,
            token_nbytes=self._token_nbytes,
            descriptors_per_token=self._token_descriptors,
        )

    # -- observations ---------------------------------------------------------------

    def observe_transfer(
        self,
        *,
        peer: str,
        nbytes: int,
        descriptors: int,
        seconds: float,
        first_contact: bool = False,
    ) -> None:
        if not usable(max(1, descriptors), nbytes, seconds) or nbytes <= 0:
            self.rejected += 1
            return
        now = self._clock()
        known = self._peer(_engine_of(peer))
        if first_contact:
            for pulls in (known, self._all):
                pulls.first_contacts += 1
                pulls.first_contact_s = seconds
            return
        sample = Sample(float(max(1, descriptors)), float(nbytes), seconds)
        rates = known.rates or self._all.rates
        known.observe(sample, now, rates)
        self._all.observe(sample, now, rates)
        self._save_when_due(now)

    def observe_step(
        self,
        *,
        tokens: int,
        context_tokens: int,
        seconds: float,
        attention_pairs: float | None = None,
    ) -> float | None:
        pairs = attention_pairs
        if pairs is None:
            pairs = tokens * (max(0, context_tokens) + tokens / 2)
        if not usable(tokens, pairs, seconds):
            self.rejected += 1
            return None
        now = self._clock()
        predicted = self._step_seconds(tokens, pairs, seconds, now)
        self._last_step_s = now
        self._chunk_tokens = max(self._chunk_tokens, tokens)
        self._steps.add(Sample(float(tokens), pairs, seconds))
        self._save_when_due(now)
        return None if predicted is None else predicted / seconds

    def _step_seconds(self, tokens: int, pairs: float, took_s: float, now: float) -> float | None:
        """What the step was expected to take; what it took moves the slowness."""
        fitted = self._compute
        rates = fitted or (self._given_compute if self._given_compute.usable else None)
        if rates is None:
            return None
        slowness = self._load(now)
        expected = rates.step_s + rates.token_s * tokens + rates.pair_s * pairs
        if fitted is not None:
            ratio = min(4.0, max(0.25, took_s / max(expected, 1e-9)))
            self._slowness = slowness * (1 - 1 / _LOAD_STEPS) + ratio / _LOAD_STEPS
        return slowness * expected

    def _peer(self, engine: str) -> _Pulls:
        known = self._peers.pop(engine, None) or _Pulls(self._known_since_s)
        self._peers[engine] = known
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return known

    # -- state ----------------------------------------------------------------------

    def _restore(self) -> None:
        state = self._file.load()
        if state is None:
            return
        self._steps.load(state.steps)
        self._chunk_tokens = max(1, min(state.chunk_tokens, 2**24))
        now = self._clock()
        for engine, rows in list(state.transfers.items())[-MAX_PEERS:]:
            pulls = self._peer(engine[:256])
            # It was known before the restart: nothing to find out for a while.
            pulls.last_s = now
            pulls.samples.load(rows)
            self._all.samples.load(rows)

    def _save_when_due(self, now: float) -> None:
        if self._file.used and now - self._saved_s >= _SAVE_S:
            self._saved_s = now
            self._file.save(self._state())

    def _state(self) -> State:
        return State(
            version=VERSION,
            identity=self.options.state_identity,
            chunk_tokens=self._chunk_tokens,
            steps=[list(sample) for sample in self._steps.kept()],
            transfers={
                engine: [list(sample) for sample in pulls.samples.kept()]
                for engine, pulls in self._peers.items()
                if len(pulls.samples)
            },
        )

    def close(self) -> None:
        if self._file.used and (self._steps.total or self._all.samples.total):
            self._file.save(self._state())
        self._file.close()

    def describe(self) -> dict[str, Any]:
        # Only what is there: a fit would race with the scheduler's thread.
        now = self._clock()
        compute = self._compute or (self._given_compute if self._given_compute.usable else None)
        fitted = [pulls.rates for pulls in [self._all, *reversed(list(self._peers.values()))]]
        given = self._given_pull if self._given_pull.usable else None
        pull = next((rates for rates in fitted if rates), given)
        return {
            "policy": "cost_model",
            "break_even_tokens": self._break_even(pull, compute),
            "token_nbytes": self._token_nbytes,
            "threshold_without_data": self.options.kv_recompute_threshold,
            "compute": asdict(compute) if compute else None,
            "steps": self._steps.total,
            "slowness": round(self._load(now), 3),
            "pull": self._all.describe(),
            "peers": {engine: pulls.describe() for engine, pulls in list(self._peers.items())},
            "rejected_observations": self.rejected,
        }


def _engine_of(peer: str) -> str:
    return peer.rpartition("/")[0] or peer


def _shown(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
