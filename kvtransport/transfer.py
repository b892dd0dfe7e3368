r"""One transfer and its states.

::

    PENDING -> IN_FLIGHT -> DONE
                   |    \-> DRAINING -> DONE | FAILED | CANCELLED | QUARANTINED
                   \-> FAILED

``DRAINING`` follows a failure of one part, a timeout, a cancel or the loss of
the peer, and lasts until the backend reports that nothing can land any more.
``DONE``, ``FAILED`` and ``CANCELLED`` mean **quiet**.  ``QUARANTINED`` means that
quiet was never proven: the memory is kept and counted for ever.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvtransport.backend import Blocks, Op
from kvtransport.errors import KVTransportError

if TYPE_CHECKING:
    from kvtransport.peer import Peer
    from kvtransport.region import Region


class TransferState(Enum):
    """Where a transfer is; see the module's diagram."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"

    def __init__(self, text: str) -> None:
        # Plain attributes: these are read several times per transfer, and hashing
        # a member or reading its ``value`` runs Python code.
        self.text = text
        self.terminal = text in {"done", "failed", "cancelled", "quarantined"}
        """Whether the state never changes again."""


class TransferDriver(Protocol):
    """What a transfer asks of its agent."""

    def wait_for(self, transfer: Transfer, timeout_s: float | None) -> None: ...
    def cancel(self, transfer: Transfer) -> None: ...
    def step(self, transfer: Transfer) -> bool: ...


class Transfer:
    """Handle of a posted transfer; instances come from ``Agent.read`` and ``write``.

    ``nbytes`` and ``descriptors`` are totals after merging.  Times are
    ``time.monotonic`` seconds.  ``error`` says why a transfer drains or how it
    ended.  Safe to use from any thread.
    """

    __slots__ = (
        "_driver",
        "deadline",
        "descriptors",
        "drain_until",
        "dropped_parts",
        "error",
        "failure",
        "finished_s",
        "nbytes",
        "notify",
        "op",
        "open_tickets",
        "parts",
        "peer",
        "regions",
        "started_s",
        "state",
        "transfer_id",
    )

    def __init__(
        self,
        driver: TransferDriver,
        *,
        transfer_id: int,
        op: Op,
        peer: Peer,
        regions: tuple[Region, ...],
        parts: tuple[Blocks, ...],
        nbytes: int,
        descriptors: int,
        notify: bytes | None,
        started_s: float,
        deadline: float,
    ) -> None:
        self._driver = driver
        self.transfer_id = transfer_id
        self.op = op
        self.peer = peer
        self.regions = regions
        self.nbytes = nbytes
        self.descriptors = descriptors
        self.notify = notify
        self.started_s = started_s
        self.deadline = deadline
        self.finished_s: float | None = None
        self.state = TransferState.PENDING
        self.error: KVTransportError | None = None
        self.parts: deque[Blocks] = deque(parts)
        """Parts that are not posted yet."""
        self.open_tickets: dict[int, Blocks] = {}
        """Parts that the backend has not reported as quiet."""
        self.failure: KVTransportError | None = None
        """First error that the backend reported for a part."""
        self.dropped_parts = False
        """Whether some part was never posted, cancelled or failed."""
        self.drain_until = 0.0

    @property
    def done(self) -> bool:
        """Whether the transfer is terminal, successfully or not."""
        return self.state.terminal

    def poll(self) -> TransferState:
        """Progress the agent without blocking and return the state."""
        if not self.state.terminal:
            self._driver.step(self)
        return self.state

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the transfer is ``DONE``; raise its error when it ended otherwise.

        Without ``timeout_s`` the transfer's own deadline bounds the wait.  When
        ``timeout_s`` passes first, ``TransferTimeoutError`` is raised and the
        transfer is *draining*: a cancel was asked for where the backend has
        one, and its memory stays pinned until it is terminal.
        """
        self._driver.wait_for(self, timeout_s)

    def cancel(self) -> None:
        """Ask for an early end; the transfer then drains.

        A terminal transfer is left alone.  Raises ``UnsupportedError`` when the
        backend cannot cancel; the transfer then goes on unharmed.
        """
        self._driver.cancel(self)

    def __repr__(self) -> str:
        return (
            f"<Transfer {self.transfer_id} {self.op.value} {self.peer.name!r} "
            f"{self.nbytes} bytes {self.state.text}>"
        )
