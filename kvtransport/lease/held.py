"""What a reader holds: a lookup in progress, its result, a lease on a peer's KV.

Threading
    Every method may be called from any thread and none waits, except
    ``Lookup.wait``.  The control thread writes, the others read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtransport.lease.digest import DigestChain
from kvtransport.lease.runs import BlockIds


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """One incarnation of a peer.  ``agents`` maps its ranks to data-plane metadata."""

    engine_id: str
    incarnation: str
    name: str
    address: str
    agents: Mapping[int, bytes] = field(repr=False)
    versions: Mapping[str, str] = field(repr=False)


class HeldLease:
    """The right to read ``block_ids`` of ``peer`` until ``deadline``.

    ``tokens`` tokens from the start are covered, a matching tail included.
    ``block_ids`` has one row of int32 ids per KV group.  ``deadline`` is on this
    process's monotonic clock, counted from before the request was sent, so it
    is never later than the owner's idea of the end; the control thread moves
    it while it renews.  Data counts only if ``valid()`` is still true when the
    read has finished.  ``diverged`` says that the peer holds more that begins
    the same but goes on differently: history was edited, or it belongs to
    another conversation with the same beginning.
    """

    __slots__ = (
        "_release",
        "block_ids",
        "deadline",
        "diverged",
        "lease_id",
        "lost",
        "peer",
        "purpose",
        "released",
        "tokens",
    )

    def __init__(
        self,
        peer: PeerEngine,
        lease_id: int,
        tokens: int,
        block_ids: tuple[BlockIds, ...],
        deadline: float,
        purpose: str,
        release: Callable[[HeldLease, bool], None],
        *,
        diverged: bool = False,
    ) -> None:
        self.peer = peer
        self.lease_id = lease_id
        self.tokens = tokens
        self.block_ids = block_ids
        self.deadline = deadline
        self.purpose = purpose
        self.diverged = diverged
        self.lost = False
        self.released = False
        self._release = release

    def valid(self, now: float | None = None) -> bool:
        """Whether the owner certainly still protects the blocks."""
        at = time.monotonic() if now is None else now
        return not self.lost and not self.released and at < self.deadline

    def release(self, delivered: bool) -> None:
        """End the lease; ``delivered`` says that the data arrived and was accepted.

        Calls after the first do nothing.
        """
        if not self.released:
            self.released = True
            self._release(self, delivered)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """``lease`` is ``None`` unless ``reason`` is ``"found"``.

    Other reasons: ``no_holding`` (asked, nobody holds more than ``min_tokens``),
    ``timeout``, ``no_peer`` (nobody to ask), ``incompatible``, ``refused``,
    ``cancelled``, ``closed``.  ``seconds`` is how long the lookup took.
    """

    lease: HeldLease | None
    reason: str
    seconds: float
    asked: int = 0
    tail_mismatch: bool = False


class Lookup:
    """A question on its way to one or more peers.  ``poll`` it; it never raises."""

    __slots__ = (
        "_best",
        "_clock",
        "_done",
        "_lock",
        "_result",
        "asked",
        "chain",
        "deadline",
        "handoff_request_id",
        "min_tokens",
        "started",
        "tail_mismatch",
        "targets",
    )

    def __init__(
        self,
        chain: DigestChain,
        targets: tuple[str, ...] | None,
        handoff_request_id: str,
        min_tokens: int,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.chain = chain
        self.targets = targets
        self.handoff_request_id = handoff_request_id
        self.min_tokens = min_tokens
        self.started = clock()
        self.deadline = self.started + deadline_s
        self.asked = 0
        self.tail_mismatch = False
        self._clock = clock
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._best: HeldLease | None = None
        self._result: LookupResult | None = None

    # -- for the caller ---------------------------------------------------------------

    def poll(self) -> LookupResult | None:
        """The result, or ``None`` before the deadline; never ``None`` after it."""
        if self._result is None and self._clock() >= self.deadline:
            self.finish("timeout")
        return self._result

    def wait(self, timeout_s: float) -> LookupResult | None:
        """``poll`` after waiting for a result for at most ``timeout_s``."""
        end = min(self.deadline, self._clock() + timeout_s)
        while not self._done.is_set() and (left_s := end - self._clock()) > 0:
            self._done.wait(left_s)
        return self.poll()

    def cancel(self) -> None:
        """Nobody wants the result: a lease that was found, or still arrives, is released."""
        with self._lock:
            lease, self._best = self._best, None
        if not self.finish("cancelled"):
            assert self._result is not None
            lease = self._result.lease
        if lease is not None:
            lease.release(delivered=False)

    # -- for the control plane ----------------------------------------------------------

    @property
    def result(self) -> LookupResult | None:
        """The result, if there is one."""
        return self._result

    def offer(self, lease: HeldLease) -> HeldLease | None:
        """Keep the longer of this lease and the best so far; returns the one to release."""
        with self._lock:
            best = self._best
            if self._result is not None or (best is not None and best.tokens >= lease.tokens):
                return lease
            self._best = lease
            return best

    def finish(self, reason: str) -> bool:
        """Set the result unless there is one: the best lease, or ``reason`` for none."""
        with self._lock:
            if self._result is not None:
                return False
            self._result = LookupResult(
                self._best,
                reason if self._best is None else "found",
                self._clock() - self.started,
                self.asked,
                self.tail_mismatch,
            )
        self._done.set()
        return True
