"""What an agent counted since it was opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransport.backend import Op
from kvtransport.transfer import Transfer, TransferState


@dataclass(frozen=True, slots=True)
class AgentStats:
    """A snapshot; totals since opening, except ``in_flight`` and ``quarantined_bytes``.

    ``transfers`` counts ends by (op, final state).  ``bytes_moved`` and
    ``descriptors`` count successful transfers only, by op.  ``*_dropped`` are
    events that nobody read before their queue was full.
    """

    transfers: dict[tuple[str, str], int]
    bytes_moved: dict[str, int]
    descriptors: dict[str, int]
    in_flight: int
    quarantined_bytes: int
    contract_errors: int
    late_completions: int
    events_dropped: int
    notifications_dropped: int
    peers_lost: int


@dataclass(slots=True)
class Counters:
    """The mutable part behind ``AgentStats``."""

    transfers: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=dict)
    contract_errors: int = 0
    peers_lost: int = 0

    def finished(self, transfer: Transfer) -> None:
        op, state = "read" if transfer.op is Op.READ else "write", transfer.state
        key = (op, state.text)
        self.transfers[key] = self.transfers.get(key, 0) + 1
        if state is TransferState.DONE:
            self.bytes_moved[op] = self.bytes_moved.get(op, 0) + transfer.nbytes
            self.descriptors[op] = self.descriptors.get(op, 0) + transfer.descriptors
