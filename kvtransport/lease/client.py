"""The reader's side of the control plane: asks peers, keeps leases alive, gives them back.

Threading
    The control thread only; ``release`` gets to it what other threads release.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtransport.errors import ProtocolError
from kvtransport.lease import protocol
from kvtransport.lease.digest import DIGEST_NBYTES, DigestChain
from kvtransport.lease.held import HeldLease, Lookup, PeerEngine
from kvtransport.lease.link import PeerLink
from kvtransport.lease.runs import decode_runs

logger = logging.getLogger("kvtransport.lease.client")

MAX_BLOCKS_PER_ROW = 2**22

MAX_CHAIN_NBYTES = 3 * 2**20
"""Digests of 3 million tokens in groups of 16; below the least ``max_message_bytes`` in use."""


@dataclass(slots=True, eq=False)
class Asked:
    """One lookup, as sent to one peer."""

    search: Search
    link: PeerLink
    peer: PeerEngine
    sent: float


@dataclass(slots=True, eq=False)
class Search:
    """A lookup's progress: how many still have to answer, and what the others said."""

    lookup: Lookup
    waiting: int = 0
    reasons: set[str] = field(default_factory=set)
    finished: bool = False


@dataclass(slots=True, eq=False)
class Kept:
    """A lease that is not given back yet, and the renewal that waits for its answer."""

    lease: HeldLease
    link: PeerLink
    renewal_id: int = 0
    renewal_sent: float = 0.0


class LeaseClient:
    """Lookups, renewals and releases over the links that ``control`` maintains."""

    def __init__(
        self,
        reader: str,
        *,
        group_tokens: int,
        lease_s: float,
        clock: Callable[[], float],
        release: Callable[[HeldLease, bool], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._reader = reader
        self._group_tokens = group_tokens
        self._lease_s = lease_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._asked: dict[int, Asked] = {}
        self._renewals: dict[int, Kept] = {}
        self._parked: dict[PeerLink, list[Search]] = {}
        self._leases: dict[HeldLease, Kept] = {}
        self._release = release

    def next_id(self) -> int:
        return next(self._ids)

    # -- timers -------------------------------------------------------------------------

    def next_s(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def tick(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2](now)

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._serial), action))

    # -- lookups ------------------------------------------------------------------------

    def begin(self, lookup: Lookup, links: Iterable[PeerLink]) -> None:
        """Ask every usable link at once; wait for those that may become usable soon."""
        search = Search(lookup)
        if lookup.result is not None:
            self._finish(search)
            return
        for link in links:
            if link.usable:
                self._ask(search, link)
            elif link.hopeful:
                search.waiting += 1
                self._parked.setdefault(link, []).append(search)
            else:
                search.reasons.add("incompatible" if link.state == "incompatible" else "no_peer")
        if search.waiting:
            self._at(lookup.deadline, lambda _now: self._finish(search, "timeout"))
        else:
            self._finish(search)

    def _ask(self, search: Search, link: PeerLink) -> None:
        lookup, peer = search.lookup, link.peer
        assert peer is not None
        request_id, sent = self.next_id(), self._clock()
        link.last_used = sent
        digests, tokens = lookup.chain.digests, lookup.chain.num_tokens
        if len(digests) > MAX_CHAIN_NBYTES:
            # Larger messages are refused; the prefix that fits is a good question too.
            digests = digests[:MAX_CHAIN_NBYTES]
            tokens = len(digests) // DIGEST_NBYTES * self._group_tokens
        message = protocol.Lookup(
            request_id,
            peer.incarnation,
            self._reader,
            digests,
            tokens,
            self._group_tokens,
            lookup.min_tokens,
            self._lease_s,
            lookup.handoff_request_id,
        )
        if not link.send(message):
            search.reasons.add("no_peer")
            return
        lookup.asked += 1
        search.waiting += 1
        self._asked[request_id] = Asked(search, link, peer, sent)

    def link_changed(self, link: PeerLink) -> None:
        """The link's state changed: go on with lookups that waited for it."""
        if link.hopeful:
            return
        for search in self._parked.pop(link, ()):
            search.waiting -= 1
            if search.lookup.result is not None:
                self._finish(search)
                continue
            if link.usable:
                self._ask(search, link)
            else:
                search.reasons.add("incompatible" if link.state == "incompatible" else "no_peer")
            if not search.waiting:
                self._finish(search)

    def link_lost(self, link: PeerLink, *, incarnation_gone: bool) -> None:
        """Nothing that was asked there will be answered; a gone incarnation's leases are lost."""
        for request_id, asked in list(self._asked.items()):
            if asked.link is link:
                del self._asked[request_id]
                self._one_less(asked.search, "no_peer")
        if incarnation_gone:
            for kept in list(self._leases.values()):
                if kept.link is link:
                    self._lose(kept.lease, "lease.lost_incarnation")
        self.link_changed(link)

    def _one_less(self, search: Search, reason: str) -> None:
        search.reasons.add(reason)
        search.waiting -= 1
        if not search.waiting:
            self._finish(search)

    def _finish(self, search: Search, reason: str = "") -> None:
        if search.finished:
            return
        search.finished = True
        if not reason:
            known = ("no_holding", "refused", "incompatible", "no_peer")
            reason = next((word for word in known if word in search.reasons), "no_peer")
        # The caller may have ended it by deadline or cancelled it: then that counts.
        search.lookup.finish(reason)
        result = search.lookup.result
        assert result is not None
        self.counters[f"lookup.{result.reason}"] += 1
        if search.waiting:
            self._forget(search)

    def _forget(self, search: Search) -> None:
        for searches in self._parked.values():
            if search in searches:
                searches.remove(search)

    # -- answers --------------------------------------------------------------------------

    def on_message(self, link: PeerLink, message: protocol.ToReader) -> None:
        """Everything but hello's answer."""
        if isinstance(message, protocol.LookupReply):
            self._on_lookup(message)
        elif isinstance(message, protocol.RenewReply):
            self._on_renew(message)
        elif isinstance(message, protocol.Error):
            self._on_error(link, message)

    def _on_lookup(self, reply: protocol.LookupReply) -> None:
        asked = self._asked.pop(reply.request_id, None)
        if asked is None:
            self.counters["answer.unknown"] += 1
            return
        search = asked.search
        if not reply.lease_id:
            self._one_less(search, reply.reason if reply.reason == "no_holding" else "refused")
            return
        try:
            lease = self._lease(asked, reply)
        except ProtocolError as error:
            logger.warning("bad grant: peer=%s error=%s", asked.peer.name, error)
            self.counters["answer.malformed"] += 1
            asked.link.send(protocol.Release(asked.peer.incarnation, reply.lease_id, False))
            self._one_less(search, "refused")
            return
        self._leases[lease] = Kept(lease, asked.link)
        self._at(lease.deadline - reply.duration_s / 2, lambda now: self._renew(lease, now))
        self._keep_best(search, lease)

    def _keep_best(self, search: Search, lease: HeldLease) -> None:
        loser: HeldLease | None = lease
        if lease.tokens > search.lookup.min_tokens:
            loser = search.lookup.offer(lease)
        if loser is not None:
            loser.release(delivered=False)
        self._one_less(search, "no_holding")

    def _lease(self, asked: Asked, reply: protocol.LookupReply) -> HeldLease:
        """The lease in a reply, its tail verified; ``ProtocolError`` if it can't be right."""
        chain, size = asked.search.lookup.chain, self._group_tokens
        tokens = reply.tokens
        if tokens % size or tokens + reply.tail_tokens > chain.num_tokens:
            raise ProtocolError(
                f"granted {tokens} + {reply.tail_tokens} tokens of {chain.num_tokens}"
            )
        if reply.tail_tokens:
            digest = chain.tail_digest(tokens // size, reply.tail_tokens)
            if digest and digest == reply.tail_digest:
                tokens += reply.tail_tokens
            else:
                self.counters["answer.tail_mismatch"] += 1
                asked.search.lookup.tail_mismatch = True
        rows = tuple(decode_runs(row, max_blocks=MAX_BLOCKS_PER_ROW) for row in reply.block_runs)
        return HeldLease(
            asked.peer,
            reply.lease_id,
            tokens,
            rows,
            asked.sent + reply.duration_s,
            reply.purpose,
            self._release,
            diverged=_diverged(chain, reply, size),
        )

    def _on_error(self, link: PeerLink, message: protocol.Error) -> None:
        self.counters[f"refused.{message.code}"] += 1
        if message.code == "stale_incarnation":
            link.hello_soon(self._clock())
        elif message.code == "protocol_version":
            link.refuse(message.message, self._clock())
            self.link_lost(link, incarnation_gone=False)
        asked = self._asked.pop(message.request_id, None)
        if asked is not None:
            known = {"incompatible": "incompatible", "stale_incarnation": "no_peer"}
            self._one_less(asked.search, known.get(message.code, "refused"))
        kept = self._renewals.pop(message.request_id, None)
        if kept is not None:
            self._lose(kept.lease, "lease.lost_refused")

    # -- leases ---------------------------------------------------------------------------

    def _renew(self, lease: HeldLease, now: float) -> None:
        kept = self._leases.get(lease)
        if kept is None:
            return
        if now >= lease.deadline:
            self._lose(lease, "lease.lost_deadline")
            return
        self._renewals.pop(kept.renewal_id, None)
        kept.renewal_id, kept.renewal_sent = self.next_id(), self._clock()
        message = protocol.Renew(
            kept.renewal_id, lease.peer.incarnation, lease.lease_id, self._lease_s
        )
        if kept.link.send(message):
            self._renewals[kept.renewal_id] = kept
        # Half of what is left, so that a lost message is tried again in time.
        pause = max(0.05, (lease.deadline - now) / 2)
        self._at(min(lease.deadline, now + pause), lambda then: self._renew(lease, then))

    def _on_renew(self, reply: protocol.RenewReply) -> None:
        kept = self._renewals.pop(reply.request_id, None)
        if kept is None:
            return
        lease = kept.lease
        if reply.lease_id != lease.lease_id or not reply.live:
            self._lose(lease, "lease.lost_refused")
            return
        lease.deadline = max(lease.deadline, kept.renewal_sent + reply.duration_s)
        self.counters["lease.renewed"] += 1

    def _lose(self, lease: HeldLease, counter: str) -> None:
        if self._forget_lease(lease) is not None:
            lease.lost = True
            self.counters[counter] += 1

    def _forget_lease(self, lease: HeldLease) -> PeerLink | None:
        kept = self._leases.pop(lease, None)
        if kept is None:
            return None
        self._renewals.pop(kept.renewal_id, None)
        return kept.link

    def give_back(self, lease: HeldLease, delivered: bool) -> None:
        """Tell the owner; if that is lost, the rest of the lease is all it costs."""
        link = self._forget_lease(lease)
        if link is None:
            return
        self.counters["lease.delivered" if delivered else "lease.released"] += 1
        message = protocol.Release(lease.peer.incarnation, lease.lease_id, delivered)
        if not link.send(message):
            self.counters["lease.release_unsent"] += 1

    def abandon_all(self) -> None:
        """Before closing: end every lookup and give every lease back."""
        for asked in list(self._asked.values()):
            self._finish(asked.search, "closed")
        for searches in self._parked.values():
            for search in list(searches):
                self._finish(search, "closed")
        for lease in list(self._leases):
            lease.released = True
            self.give_back(lease, delivered=False)

    def snapshot(self) -> dict[str, Any]:
        return {
            "lookups": len(self._asked),
            "leases": len(self._leases),
            "counters": dict(self.counters),
        }


def _diverged(chain: DigestChain, reply: protocol.LookupReply, size: int) -> bool:
    """Whether query and holding both go on after the match, but with different tokens."""
    matched = reply.tokens // size
    if reply.tail_tokens:
        return chain.tail_digest(matched, reply.tail_tokens) != reply.tail_digest
    return chain.groups > matched and reply.held_tokens // size > matched
