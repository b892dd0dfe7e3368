"""How a turn's reuse ended: the names used in logs, metrics and reports.

Every turn that asks for reuse ends in exactly one of them, so that the number
of attempts, less the sum over outcomes, is that of the turns under way.
"""

from __future__ import annotations

from typing import Final

PULLED: Final = "pulled"

# Nothing was read, for a reason that is no failure.
NO_HOLDING: Final = "no_holding"
NO_PEER: Final = "no_peer"
LOCAL_HIT: Final = "local_hit"
POLICY: Final = "policy"
DISABLED: Final = "disabled"
TOO_SHORT: Final = "too_short"
CONTENT_MISMATCH: Final = "content_mismatch"
"""What a peer holds goes on differently before it could add anything: an edited
history, or another conversation with the same beginning."""

# Something went wrong and the turn was computed here instead.
LOOKUP_TIMEOUT: Final = "lookup_timeout"
LEASE_REFUSED: Final = "lease_refused"
LEASE_EXPIRED: Final = "lease_expired"
INCOMPATIBLE: Final = "incompatible"
HANDSHAKE: Final = "handshake"
PEER_LOST: Final = "peer_lost"
STALE: Final = "stale"
TRANSPORT: Final = "transport"
TRANSFER_TIMEOUT: Final = "transfer_timeout"

# The client went away first.
ABORTED: Final = "aborted"

ALL: Final = (
    PULLED,
    NO_HOLDING,
    NO_PEER,
    LOCAL_HIT,
    POLICY,
    DISABLED,
    TOO_SHORT,
    CONTENT_MISMATCH,
    LOOKUP_TIMEOUT,
    LEASE_REFUSED,
    LEASE_EXPIRED,
    INCOMPATIBLE,
    HANDSHAKE,
    PEER_LOST,
    STALE,
    TRANSPORT,
    TRANSFER_TIMEOUT,
    ABORTED,
)

FAILURES: Final = frozenset(
    {
        LOOKUP_TIMEOUT,
        LEASE_REFUSED,
        LEASE_EXPIRED,
        INCOMPATIBLE,
        HANDSHAKE,
        PEER_LOST,
        STALE,
        TRANSPORT,
        TRANSFER_TIMEOUT,
    }
)
