"""What an engine keeps readable, and what it hands out about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransport.lease.digest import DIGEST_NBYTES
from kvtransport.lease.runs import BlockIds


class _Counted(Enum):
    """Each member knows the names that the ledger counts it under."""

    def __init__(self, value: str) -> None:
        # Plain attributes: ``value`` goes through a descriptor on every access.
        self.inserted = f"inserted.{value}"
        self.dropped = f"dropped.{value}"
        self.refused = f"refused.{value}"


class Purpose(_Counted):
    """Why blocks are kept."""

    HANDOFF = "handoff"
    """Just prefilled for another engine: must be delivered, does not yield."""
    RETAINED = "retained"
    """Finished here and possibly useful later: yields at once."""


class DropReason(_Counted):
    """Why a holding's block references have to be dropped."""

    EXPIRED = "expired"
    HANDOFF_EXPIRED = "handoff_expired"
    PRESSURE = "pressure"
    BUDGET = "budget"
    SUPERSEDED = "superseded"
    DELIVERED = "delivered"
    WITHDRAWN = "withdrawn"
    RESET = "reset"


class Refusal(_Counted):
    """Why ``Ledger.insert`` did not take a holding."""

    POLICY = "policy"
    OVER_BUDGET = "over_budget"
    NOT_WORTH = "not_worth"


class Holding(msgspec.Struct, eq=False, gc=False):
    """Blocks of one token sequence that stay readable.

    ``tokens`` is the exact token count, ``chain`` 16 digest bytes per full
    group, ``tail_digest`` covers the tokens behind the last full group (empty
    when there are none).  ``block_ids`` has one row per KV group, in token
    order; ``blocks`` and ``nbytes`` count all of them.  ``created_s`` and
    ``expires_s`` are on the ledger's clock.  ``turns`` counts how often the
    conversation had come back before; ``saved_s`` is the compute time that a
    pull of all tokens saves, 0 when unknown.  ``alone`` counts the blocks that no
    other retained holding kept when this one was added, and when it is removed
    those that none keeps any more: summed up, blocks in use.

    ``policy_data`` belongs to the retention policy, the rest to the ledger.
    """

    holding_id: int
    request_id: str
    tokens: int
    chain: bytes
    tail_digest: bytes
    block_ids: tuple[BlockIds, ...]
    purpose: Purpose
    tenant: str
    nbytes: int
    blocks: int
    created_s: float
    expires_s: float
    saved_s: float = 0.0
    turns: int = 0
    leases: int = 0
    returned: bool = False
    ending: DropReason | None = None
    node: int = 0
    timer: int = 0
    counted: NDArray[np.intp] | None = None
    alone: int = 0
    policy_data: Any = None

    def __repr__(self) -> str:
        return (
            f"Holding({self.holding_id}, {self.request_id!r}, {self.purpose.name},"
            f" tokens={self.tokens}, blocks={self.blocks}, leases={self.leases})"
        )

    @property
    def groups(self) -> int:
        return len(self.chain) // DIGEST_NBYTES


@dataclass(frozen=True, slots=True)
class Grant:
    """The owner's answer to a lookup that found something.

    ``tokens`` full-group tokens match for certain.  When ``tail_tokens`` is not
    0, the holding goes on with that many tokens, whose digest is
    ``tail_digest``: the reader compares it with its own tokens and then counts
    ``tokens + tail_tokens``, otherwise ``tokens``.  ``block_ids`` cover
    ``tokens + tail_tokens``, one row per KV group, in token order.
    ``held_tokens`` is how long the holding is, whether it matches or not.
    """

    holding_id: int
    lease_id: int
    tokens: int
    tail_tokens: int
    tail_digest: bytes
    block_ids: tuple[BlockIds, ...]
    duration_s: float
    purpose: Purpose
    held_tokens: int
    """All tokens of the holding; the reader sees by it where texts part."""


class Dropped(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A holding whose block references must be dropped now, exactly once."""

    holding: Holding
    reason: DropReason


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's right to read a holding until ``expires_s`` on the owner's clock."""

    lease_id: int
    holding: Holding
    reader: str
    handoff_request_id: str
    began_s: float
    expires_s: float
    timer: int = 0
