"""An engine's record of the KV that it keeps readable for others.

Architecture
    Holdings are found by content through a prefix index.  A lookup answers with
    a lease; while a lease is live the holding's blocks are neither given up nor
    expired.  The retention policy chooses what to keep and what to give up, the
    ledger enforces the budget and hands every holding that ended exactly once
    to ``collect``, whose caller drops the block references.

Threading
    One lock.  ``insert``, ``make_room``, ``collect`` and ``reset`` are for the
    scheduler's thread, because the caller touches and frees blocks around them;
    everything else may be called from any thread.

Time
    ``clock`` must be monotonic.  A holding or lease is live while
    ``now < expires_s``.  A lease may outlive its holding's own expiry.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtransport.errors import ConfigError
from kvtransport.lease.digest import GROUP_TOKENS, DigestChain
from kvtransport.lease.holding import (
    Dropped,
    DropReason,
    Grant,
    Holding,
    Lease,
    Purpose,
    Refusal,
)
from kvtransport.lease.prefix_index import Place, PrefixIndex, common_groups
from kvtransport.lease.retained import Gauges, Retained
from kvtransport.lease.runs import BlockIds
from kvtransport.lease.timeline import Timeline
from kvtransport.policy.retention import RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Facts about the cache and limits on leases.

    ``cache_blocks`` is the cache's size, ``block_tokens`` the tokens per block
    of each KV group, ``null_block`` the placeholder id that holds no data.
    ``handoff_ttl_s`` is how long an undelivered handoff waits for its reader.
    A lease is granted for at most ``lease_max_s`` and renewed for at most
    ``lease_total_s`` altogether, so that a stuck reader can't pin blocks for ever.
    """

    cache_blocks: int
    block_tokens: tuple[int, ...]
    group_tokens: int = GROUP_TOKENS
    null_block: int | None = None
    handoff_ttl_s: float = 120.0
    lease_max_s: float = 60.0
    lease_total_s: float = 600.0

    def __post_init__(self) -> None:
        for tokens in self.block_tokens:
            if tokens < 1 or tokens % self.group_tokens:
                raise ConfigError(
                    f"block size {tokens} must be a multiple of the digest group"
                    f" ({self.group_tokens} tokens)"
                )


class Ledger:
    """What this engine keeps readable, and for whom."""

    def __init__(
        self,
        retention: RetentionPolicy,
        settings: LedgerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._lock = threading.Lock()
        self._index = PrefixIndex()
        self._holdings: dict[int, Holding] = {}
        self._handoffs: dict[str, Holding] = {}
        self._leases: dict[int, Lease] = {}
        self._expiries: Timeline[Holding] = Timeline()
        self._lease_ends: Timeline[Lease] = Timeline()
        self._retained = Retained(retention, settings.cache_blocks, settings.null_block)
        self._dropped: list[Dropped] = []
        self._next_id = 0

    # -- scheduler thread --------------------------------------------------------

    def insert(
        self,
        chain: DigestChain,
        block_ids: Sequence[BlockIds | Sequence[int]],
        *,
        request_id: str,
        purpose: Purpose,
        nbytes: int,
        tenant: str = "",
        saved_s: float = 0.0,
    ) -> Holding | None:
        """Keep ``chain``'s KV readable; the caller has taken its block references.

        ``block_ids`` has one row per KV group, ``nbytes`` is the size of all of
        it, ``saved_s`` the compute time that a pull saves (0: unknown).

        Returns ``None`` when the policy or the budget refuses; the caller then
        still owns its references.  In every case ``collect`` may have something
        new to drop.  Raises ``ConfigError`` for block ids that can't be right.
        """
        rows = self._rows(block_ids, chain.num_tokens)
        with self._lock:
            now = self._clock()
            self._expire(now)
            holding = self._new_holding(chain, rows, request_id, purpose, tenant, nbytes, now)
            holding.saved_s = saved_s
            place = self._index.find(holding.chain)
            if purpose is Purpose.HANDOFF:
                self._insert_handoff(holding)
            else:
                refusal = self._insert_retained(holding, chain, place, now)
                if refusal is not None:
                    self.counters[refusal.refused] += 1
                    return None
            self._holdings[holding.holding_id] = holding
            self._expiries.add(holding)
            if holding.chain:
                self._index.add(holding, place)
            self.counters[purpose.inserted] += 1
            return holding

    def make_room(self, blocks: int) -> int:
        """Give up retained, unleased holdings until ``blocks`` blocks come free.

        Returns how many blocks no holding keeps any more; fewer than asked when
        nothing is left to give up.  A block that a live request uses too does
        not come free by this, so check and ask again.  The references are
        dropped by what ``collect`` returns next.
        """
        freed = 0
        with self._lock:
            now = self._clock()
            self._expire(now)
            while freed < blocks:
                victim = self._retained.policy.victim(now, None)
                if victim is None:
                    break
                freed += self._drop(victim, DropReason.PRESSURE, now)
        return freed

    def collect(self) -> list[Dropped]:
        """Everything whose block references must be dropped now, each exactly once."""
        with self._lock:
            self._expire(self._clock())
            dropped, self._dropped = self._dropped, []
            return dropped

    def reset(self) -> bool:
        """Give up everything that isn't leased, handoffs too; leased ones end with their leases.

        True if nothing is kept any more.
        """
        with self._lock:
            now = self._clock()
            self._expire(now)
            for holding in list(self._holdings.values()):
                self._end(holding, DropReason.RESET, now)
            return not self._holdings

    def withdraw(self, request_id: str) -> bool:
        """Give up the handoff of a request that will not be fetched; False if there is none.

        May be called from any thread.
        """
        with self._lock:
            holding = self._handoffs.get(request_id)
            if holding is None:
                return False
            self._end(holding, DropReason.WITHDRAWN, self._clock())
            return True

    def note_admitted(self, chain: bytes) -> None:
        """Tell the policy that a request with this chain was admitted on this engine."""
        with self._lock:
            now = self._clock()
            for holding in self._index.prefixes(self._index.find(chain)):
                if holding.purpose is Purpose.RETAINED:
                    self._retained.policy.admitted(holding, now)
                    return

    # -- any thread ----------------------------------------------------------------

    def lookup(
        self,
        chain: bytes,
        tokens: int,
        *,
        duration_s: float,
        reader: str,
        handoff_request_id: str = "",
        min_tokens: int = 0,
    ) -> Grant | None:
        """Lease the longest prefix of ``chain`` that is held.

        ``tokens`` is the exact length of the query.  ``handoff_request_id``
        names the prefilled request that this reader must fetch; it is preferred
        when its match is as long as any.  Returns ``None`` when no more than
        ``min_tokens`` tokens could be granted.
        """
        with self._lock:
            now = self._clock()
            self._expire(now)
            holding, groups = self._best(chain, handoff_request_id)
            if holding is None:
                self.counters["lookup.no_holding"] += 1
                return None
            full = groups * self.settings.group_tokens
            tail = holding.tokens - full if groups == holding.groups else 0
            if not 0 < tail <= tokens - full:
                tail = 0
            if full + tail <= min_tokens:
                self.counters["lookup.too_short"] += 1
                return None
            lease = self._begin(holding, reader, handoff_request_id, duration_s, now)
            if holding.purpose is Purpose.RETAINED and groups == holding.groups:
                self._retained.note_return(holding, now)
            self.counters["lookup.granted"] += 1
            return self._grant(holding, lease, full, tail, now)

    def renew(self, lease_id: int, duration_s: float) -> bool:
        """Let a live lease end ``duration_s`` from now; False if it is not live any more."""
        return self.renew_for(lease_id, duration_s) > 0

    def renew_for(self, lease_id: int, duration_s: float) -> float:
        """``renew``, returning for how many seconds the lease is live now; 0 if it is not."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            lease = self._leases.get(lease_id)
            if lease is None:
                self.counters["renew.refused"] += 1
                return 0.0
            end = self._lease_end(duration_s, lease.began_s, now)
            if end > lease.expires_s:
                lease.expires_s = end
                self._lease_ends.add(lease)
            self.counters["renew.granted"] += 1
            return lease.expires_s - now

    def release(self, lease_id: int, *, delivered: bool) -> bool:
        """End a lease; a delivered handoff is dropped.  False if it is not live any more."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            lease = self._leases.get(lease_id)
            if lease is None:
                self.counters["release.unknown"] += 1
                return False
            self.counters["release.delivered" if delivered else "release.undelivered"] += 1
            self._end_lease(lease, now)
            handoff = self._handoffs.get(lease.handoff_request_id) if delivered else None
            if handoff is not None:
                self._end(handoff, DropReason.DELIVERED, now)
            return True

    def expire(self) -> None:
        """End leases and holdings whose time has come."""
        with self._lock:
            self._expire(self._clock())

    def snapshot(self) -> dict[str, Any]:
        """Plain values for status pages: holdings, blocks, bytes, budget, leases, counters."""
        with self._lock:
            self._expire(self._clock())
            return {
                **self._retained.gauges(len(self._holdings), len(self._leases))._asdict(),
                "retained_nbytes": self._retained.nbytes,
                "cache_blocks": self.settings.cache_blocks,
                "to_collect": len(self._dropped),
                "index_nodes": len(self._index),
                "counters": dict(self.counters),
                "retention": self._retained.policy.describe(),
            }

    def gauges(self) -> Gauges:
        """How much is held now: what ``snapshot`` has without searching for it."""
        with self._lock:
            return self._retained.gauges(len(self._holdings), len(self._leases))

    # -- insertion -------------------------------------------------------------------

    def _rows(
        self, block_ids: Sequence[BlockIds | Sequence[int]], tokens: int
    ) -> tuple[BlockIds, ...]:
        rows = tuple([np.ascontiguousarray(row, dtype=np.int32) for row in block_ids])
        sizes = self.settings.block_tokens
        if len(rows) != len(sizes):
            raise ConfigError(f"block_ids has {len(rows)} rows, the cache {len(sizes)} KV groups")
        for row, size in zip(rows, sizes, strict=True):
            if row.ndim != 1 or len(row) * size < tokens:
                raise ConfigError(
                    f"{row.shape} blocks of {size} tokens do not cover {tokens} tokens"
                )
        return rows

    def _new_holding(
        self,
        chain: DigestChain,
        rows: tuple[BlockIds, ...],
        request_id: str,
        purpose: Purpose,
        tenant: str,
        nbytes: int,
        now: float,
    ) -> Holding:
        self._next_id += 1
        rest = chain.tail_tokens
        return Holding(
            self._next_id,
            request_id,
            chain.num_tokens,
            chain.digests,
            chain.tail_digest(chain.groups, rest) if rest else b"",
            rows,
            purpose,
            tenant,
            nbytes,
            sum(map(len, rows)),
            now,
            now + self.settings.handoff_ttl_s,
        )

    def _insert_handoff(self, holding: Holding) -> None:
        before = self._handoffs.get(holding.request_id)
        if before is not None:
            self._end(before, DropReason.SUPERSEDED, holding.created_s)
        self._handoffs[holding.request_id] = holding

    def _insert_retained(
        self, holding: Holding, chain: DigestChain, place: Place, now: float
    ) -> Refusal | None:
        ttl_s = self._retained.policy.ttl_s(holding)
        if not ttl_s > 0 or not holding.chain:
            return Refusal.POLICY
        holding.expires_s = now + ttl_s
        shorter = self._superseded(holding, chain, place)
        leaving: Sequence[Holding] = ()
        if shorter:
            holding.turns = shorter[0].turns + 1
            leaving = [old for old in shorter if not old.leases]
        refusal = self._retained.claim(holding, leaving, now, self._give_up)
        if refusal is not None:
            return refusal
        for old in shorter:
            self._retained.note_return(old, now)
            if old.leases:
                self._end(old, DropReason.SUPERSEDED, now)
            else:
                # The claim has taken it out of the retained ones.
                self._take_out(old, DropReason.SUPERSEDED)
        return None

    def _give_up(self, victim: Holding, now: float) -> None:
        self._drop(victim, DropReason.BUDGET, now)

    def _superseded(self, holding: Holding, chain: DigestChain, place: Place) -> list[Holding]:
        """Retained holdings of the same tenant whose tokens are a prefix, longest first."""
        found = []
        for old in self._index.prefixes(place):
            if old.purpose is not Purpose.RETAINED or old.tenant != holding.tenant:
                continue
            if old.tail_digest:
                tail = old.tokens - old.groups * self.settings.group_tokens
                if chain.tail_digest(old.groups, tail) != old.tail_digest:
                    continue
            found.append(old)
        return found

    # -- lookup and leases -------------------------------------------------------------

    def _best(self, chain: bytes, handoff_request_id: str) -> tuple[Holding | None, int]:
        place = self._index.find(chain)
        groups = place.depth
        handoff = self._handoffs.get(handoff_request_id) if handoff_request_id else None
        if handoff is not None:
            shared = common_groups(handoff.chain, chain)
            if shared >= groups:
                return handoff, shared
        if groups == 0:
            return None, 0
        return self._index.any_holding(place.node), groups

    def _lease_end(self, duration_s: float, began_s: float, now: float) -> float:
        if not math.isfinite(duration_s) or duration_s < 0:
            duration_s = 0.0
        longest = self.settings.lease_max_s
        return min(now + min(duration_s, longest), began_s + self.settings.lease_total_s)

    def _begin(
        self, holding: Holding, reader: str, handoff: str, duration_s: float, now: float
    ) -> Lease:
        end = self._lease_end(duration_s, now, now)
        lease = Lease(secrets.randbits(63), holding, reader, handoff, now, end)
        self._leases[lease.lease_id] = lease
        self._lease_ends.add(lease)
        holding.leases += 1
        if holding.leases == 1 and holding.purpose is Purpose.RETAINED:
            self._retained.pin(holding)
        return lease

    def _grant(self, holding: Holding, lease: Lease, full: int, tail: int, now: float) -> Grant:
        sizes = self.settings.block_tokens
        rows = tuple(
            row[: -(-(full + tail) // size)]
            for row, size in zip(holding.block_ids, sizes, strict=True)
        )
        digest = holding.tail_digest if tail else b""
        return Grant(
            holding.holding_id,
            lease.lease_id,
            full,
            tail,
            digest,
            rows,
            lease.expires_s - now,
            holding.purpose,
            holding.tokens,
        )

    def _end_lease(self, lease: Lease, now: float) -> None:
        del self._leases[lease.lease_id]
        self._lease_ends.discard(lease)
        holding = lease.holding
        holding.leases -= 1
        if holding.leases:
            return
        if holding.purpose is Purpose.RETAINED:
            self._retained.unpin(holding, now)
        if holding.ending is not None:
            self._drop(holding, holding.ending, now)

    # -- endings -------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        if now < self._lease_ends.next_s and now < self._expiries.next_s:
            return
        while (lease := self._lease_ends.due(now)) is not None:
            self.counters["lease.expired"] += 1
            self._end_lease(lease, now)
        while (holding := self._expiries.due(now)) is not None:
            handoff = holding.purpose is Purpose.HANDOFF
            reason = DropReason.HANDOFF_EXPIRED if handoff else DropReason.EXPIRED
            self._end(holding, reason, now)

    def _end(self, holding: Holding, reason: DropReason, now: float) -> None:
        """Drop the holding, or let it end with its last lease; no new leases from now on."""
        if not holding.leases:
            self._drop(holding, reason, now)
            return
        if holding.ending is None:
            holding.ending = reason
        self._hide(holding)

    def _hide(self, holding: Holding) -> None:
        """Nobody finds the holding any more."""
        self._index.remove(holding)
        self._expiries.discard(holding)
        if holding.purpose is Purpose.HANDOFF and self._handoffs.get(holding.request_id) is holding:
            del self._handoffs[holding.request_id]

    def _drop(self, holding: Holding, reason: DropReason, now: float) -> int:
        """Hand the holding to ``collect``; returns how many blocks nobody retains now."""
        freed = 0
        if holding.purpose is Purpose.RETAINED:
            freed = self._retained.forget(holding)
            self._retained.note_end(holding, now)
        self._take_out(holding, reason)
        return freed

    def _take_out(self, holding: Holding, reason: DropReason) -> None:
        del self._holdings[holding.holding_id]
        self._hide(holding)
        self._dropped.append(Dropped(holding, reason))
        self.counters[reason.dropped] += 1
