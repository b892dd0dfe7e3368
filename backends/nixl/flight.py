"""One transfer on its way through NIXL."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvtransport.backend import Op
from kvtransport.errors import KVTransportError
from kvtransport_backends.nixl.parts import Part
from kvtransport_backends.nixl.peers import Peer


@dataclass(slots=True)
class Flight:
    """A posted transfer.

    ``parts`` are not given to NIXL yet, ``handles`` are and have not ended.
    ``posted`` says whether NIXL ever got a part.
    ``error`` is reported once nothing of the flight can land any more:
    ``settle_until`` is set when only time can tell, and a ``stuck`` flight
    never ends, because NIXL offers no proof.
    """

    ticket: int
    op: Op
    peer: Peer
    parts: deque[Part]
    notify: bytes
    handles: list[int] = field(default_factory=list)
    error: KVTransportError | None = None
    settle_until: float | None = None
    stuck: bool = False
    posted: bool = False
