"""The owner's side of the control plane: answers readers from the ledger.

Nothing that arrives can end the service: whatever can't be decoded, comes too
fast or makes no sense is counted and dropped, or answered with an ``Error``.

Threading
    One thread, the control plane's; only ``set_agents`` may be called from others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvtransport.errors import IncompatiblePeerError, ProtocolError
from kvtransport.lease import protocol
from kvtransport.lease.holding import Grant
from kvtransport.lease.identity import EngineIdentity, compare
from kvtransport.lease.ledger import Ledger
from kvtransport.lease.runs import encode_runs

logger = logging.getLogger("kvtransport.lease.server")

MAX_CLIENTS = 4096


class RateLimit:
    """A token bucket per client, for a bounded number of clients."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def allows(self, client: bytes) -> bool:
        now = self._clock()
        left, since = self._buckets.get(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return allowed


class LeaseServer:
    """Turns one request frame into at most one reply frame."""

    def __init__(
        self,
        identity: EngineIdentity,
        ledger: Ledger,
        *,
        rate_per_s: float,
        status: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.counters: Counter[str] = Counter()
        self._ledger = ledger
        self._status = status
        self._rate = RateLimit(rate_per_s, max(100.0, rate_per_s / 5), clock)
        self._agents: tuple[int, dict[int, bytes]] = (0, {})
        self._warned: OrderedDict[str, None] = OrderedDict()

    def set_agents(self, agents: Mapping[int, bytes]) -> None:
        """Publish data-plane metadata; readers fetch it again when it changes."""
        self._agents = (self._agents[0] + 1, dict(agents))

    def handle(self, client: bytes, frames: list[bytes]) -> bytes | None:
        """The reply to one message, or ``None``."""
        if not self._rate.allows(client):
            self.counters["dropped.rate"] += 1
            return None
        if len(frames) != 1:
            self.counters["dropped.frames"] += 1
            return None
        try:
            message = protocol.decode_to_owner(frames[0])
        except protocol.VersionMismatchError as error:
            self.counters["refused.version"] += 1
            return protocol.encode(protocol.Error(0, "protocol_version", str(error)))
        except ProtocolError as error:
            self.counters["dropped.malformed"] += 1
            logger.debug("malformed control message: %s", error)
            return None
        reply = self._answer(message)
        return None if reply is None else protocol.encode(reply)

    def _answer(self, message: protocol.ToOwner) -> protocol.ToReader | None:
        self.counters[f"received.{type(message).__name__.lower()}"] += 1
        if isinstance(message, protocol.Hello):
            return self._hello(message)
        if isinstance(message, protocol.StatusRequest):
            return protocol.StatusReply(message.request_id, msgspec.json.encode(self._status()))
        if message.incarnation != self.identity.incarnation:
            # Granted, or asked of, an engine that ran here before this one.
            self.counters["refused.incarnation"] += 1
            if isinstance(message, protocol.Release | protocol.Discard):
                return None
            text = f"incarnation: mine {self.identity.incarnation}, asked {message.incarnation}"
            return protocol.Error(message.request_id, "stale_incarnation", text)
        if isinstance(message, protocol.Lookup):
            return self._lookup(message)
        if isinstance(message, protocol.Renew):
            left_s = self._ledger.renew_for(message.lease_id, message.duration_s)
            return protocol.RenewReply(message.request_id, message.lease_id, left_s > 0, left_s)
        if isinstance(message, protocol.Release):
            self._ledger.release(message.lease_id, delivered=message.delivered)
        else:
            self._ledger.withdraw(message.handoff_request_id)
        return None

    def _hello(self, hello: protocol.Hello) -> protocol.HelloReply:
        try:
            compare(self.identity.fingerprint, hello.fingerprint)
        except IncompatiblePeerError as error:
            self.counters["refused.fingerprint"] += 1
            self._warn_once(hello, str(error))
        revision, agents = self._agents
        return protocol.HelloReply(
            hello.request_id,
            self.identity.engine_id,
            self.identity.incarnation,
            dict(self.identity.fingerprint),
            dict(self.identity.versions),
            revision > 0,
            revision,
            None if hello.known_revision == revision else agents,
        )

    def _warn_once(self, hello: protocol.Hello, reason: str) -> None:
        key = f"{hello.engine_id} {hello.incarnation}"
        if key in self._warned:
            return
        self._warned[key] = None
        if len(self._warned) > MAX_CLIENTS:
            self._warned.popitem(last=False)
        logger.warning(
            "incompatible reader: engine_id=%s address=%s reason=%s",
            hello.engine_id,
            hello.address,
            reason,
        )

    def _lookup(self, message: protocol.Lookup) -> protocol.ToReader:
        mine = self._ledger.settings.group_tokens
        if message.group_tokens != mine:
            text = f"group_tokens: mine {mine}, asked {message.group_tokens}"
            return protocol.Error(message.request_id, "incompatible", text)
        grant = self._ledger.lookup(
            message.chain,
            message.tokens,
            duration_s=message.duration_s,
            reader=message.reader,
            handoff_request_id=message.handoff_request_id,
            min_tokens=message.min_tokens,
        )
        if grant is None:
            return protocol.LookupReply(message.request_id, "no_holding")
        return _reply(message.request_id, grant)


def _reply(request_id: int, grant: Grant) -> protocol.LookupReply:
    return protocol.LookupReply(
        request_id,
        "found",
        grant.lease_id,
        grant.tokens,
        grant.tail_tokens,
        grant.tail_digest,
        [encode_runs(row) for row in grant.block_ids],
        grant.duration_s,
        grant.purpose.value,
        grant.held_tokens,
    )
