"""Transfers in flight: posting, completions, deadlines, draining, quarantine.

One instance per agent; the agent's lock is held around every call.  The rules:

- A transfer is terminal only when the backend has reported every posted part.
- A failed, late or cancelled transfer drains: parts not yet posted are dropped,
  the others are cancelled where the backend can, and then waited for.
- What does not become quiet by the drain deadline is quarantined for ever.
- A completion nobody waits for is counted and logged, never delivered.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic

from kvtransport.backend import Backend, Blocks, Completion
from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    BackendContractError,
    BackpressureError,
    KVTransportError,
    TransferCancelledError,
    TransferFailedError,
    TransferTimeoutError,
    UnsupportedError,
)
from kvtransport.peer import Peer
from kvtransport.transfer import Transfer, TransferState

log = logging.getLogger("kvtransport.transfer")

NEVER = float("inf")


class InFlight:
    """Every transfer of one agent that is not terminal."""

    def __init__(
        self,
        backend: Backend,
        capabilities: Capabilities,
        drain_s: float,
        on_finished: Callable[[Transfer], None],
    ) -> None:
        self._backend = backend
        self._capabilities = capabilities
        self._drain_s = drain_s
        self._on_finished = on_finished
        self._tickets = count(1)
        self._last_ticket = 0
        self._by_ticket: dict[int, Transfer] = {}
        self._transfers: dict[int, Transfer] = {}
        self.waiting: deque[Transfer] = deque()
        """Transfers with parts that are not posted yet."""
        self._abandoned: set[int] = set()
        self.next_check = NEVER
        """When ``sweep`` has something to look at, ``time.monotonic`` seconds."""
        self.contract_errors = 0
        self.late_completions = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def of_peer(self, peer: Peer | None) -> list[Transfer]:
        """Transfers of one peer, or all; a copy, because ending one changes the set."""
        return [t for t in self._transfers.values() if peer is None or t.peer is peer]

    def submit(self, transfer: Transfer) -> None:
        """Post the first part, and as many others as fit now.

        Raises ``BackpressureError`` or the backend's error; nothing of the
        transfer was posted then and it may be thrown away.
        """
        self._check_room()
        self._transfers[transfer.transfer_id] = transfer
        for region in transfer.regions:
            region.users += 1
        transfer.peer.in_flight += 1
        try:
            self._post(transfer, transfer.parts[0])
        except KVTransportError:
            self._forget(transfer)
            raise
        self.next_check = min(self.next_check, transfer.deadline)
        if transfer.state is TransferState.PENDING:
            transfer.state = TransferState.IN_FLIGHT
        if transfer.parts:
            self.waiting.append(transfer)
            self.pump()

    def _check_room(self) -> None:
        limit = self._capabilities.max_in_flight
        if limit is not None and (len(self._by_ticket) >= limit or self.waiting):
            raise BackpressureError(
                f"{len(self._by_ticket)} posts are in flight and the backend's limit is {limit}; "
                "nothing was posted, try again after a completion"
            )

    def _post(self, transfer: Transfer, part: Blocks) -> None:
        """Post one part; ``KVTransportError`` means that nothing can land of it."""
        ticket = next(self._tickets)
        notify = transfer.notify if len(transfer.parts) == 1 else None
        # Entered first: a backend may never answer, and then this memory is pinned.
        self._by_ticket[ticket] = transfer
        transfer.open_tickets[ticket] = part
        self._last_ticket = ticket
        try:
            self._backend.post(ticket, transfer.op, transfer.peer.peer_id, part, notify)
        except KVTransportError:
            del self._by_ticket[ticket]
            del transfer.open_tickets[ticket]
            raise
        except Exception as error:  # noqa: BLE001  # the edge to backends
            # An untranslated exception says nothing about what was posted, so
            # the part counts as posted and drains like any other failure.
            transfer.parts.popleft()
            broken = BackendContractError(
                f"post raised {type(error).__name__}: {error}", native=error
            )
            self._breach(broken)
            self.drain(transfer, broken)
            return
        transfer.parts.popleft()

    def pump(self) -> None:
        """Post waiting parts as far as the backend's limit allows."""
        limit = self._capabilities.max_in_flight
        for _ in range(len(self.waiting)):
            transfer = self.waiting.popleft()
            while transfer.parts and transfer.state is TransferState.IN_FLIGHT:
                if limit is not None and len(self._by_ticket) >= limit:
                    break
                if not self._may_post_next(transfer):
                    break
                try:
                    self._post(transfer, transfer.parts[0])
                except BackpressureError:
                    break
                except KVTransportError as error:
                    self._fail_part(transfer, error)
            if transfer.parts and transfer.state is TransferState.IN_FLIGHT:
                self.waiting.append(transfer)

    @staticmethod
    def _may_post_next(transfer: Transfer) -> bool:
        # The message must not overtake data of the parts before it.
        last = len(transfer.parts) == 1
        return not (last and transfer.notify is not None and transfer.open_tickets)

    def complete(self, event: Completion) -> None:
        """Take the backend's word that one part is quiet."""
        transfer = self._by_ticket.pop(event.ticket, None)
        if transfer is None:
            self._unexpected(event.ticket)
            return
        del transfer.open_tickets[event.ticket]
        if event.error is not None or event.cancelled:
            if event.cancelled and transfer.state is TransferState.DRAINING:
                transfer.dropped_parts = True
                self._settle(transfer)
            else:
                self._fail_part(
                    transfer, event.error or TransferFailedError("the backend cancelled it")
                )
        elif not transfer.open_tickets:
            self._settle(transfer)

    def _unexpected(self, ticket: int) -> None:
        if ticket in self._abandoned:
            self._abandoned.discard(ticket)
            self.late_completions += 1
            log.warning("quarantined post %d completed late; its memory stays kept", ticket)
            return
        known = 0 < ticket <= self._last_ticket
        what = "a second completion of" if known else "a completion of unknown"
        self._breach(BackendContractError(f"backend reported {what} ticket {ticket}"))

    def _breach(self, error: BackendContractError) -> None:
        self.contract_errors += 1
        log.error("backend broke its contract: %s", error)

    def _fail_part(self, transfer: Transfer, error: KVTransportError) -> None:
        error.peer = error.peer or transfer.peer.name
        error.transfer_id = error.transfer_id or transfer.transfer_id
        transfer.failure = transfer.failure or error
        transfer.dropped_parts = True
        if transfer.state is not TransferState.DRAINING:
            self.drain(transfer, error)
        else:
            self._settle(transfer)

    def drain(self, transfer: Transfer, reason: KVTransportError) -> None:
        """Begin to end a transfer early; it is terminal at once when nothing is posted."""
        if transfer.state is TransferState.DRAINING or transfer.state.terminal:
            return
        transfer.state = TransferState.DRAINING
        transfer.error = reason
        reason.peer = reason.peer or transfer.peer.name
        reason.transfer_id = reason.transfer_id or transfer.transfer_id
        if transfer.parts:
            transfer.parts.clear()
            transfer.dropped_parts = True
        transfer.drain_until = monotonic() + self._drain_s
        self.next_check = min(self.next_check, transfer.drain_until)
        if self._capabilities.cancel != "none":
            self._cancel_open(transfer)
        self._settle(transfer)

    def _cancel_open(self, transfer: Transfer) -> None:
        for ticket in list(transfer.open_tickets):
            try:
                self._backend.cancel(ticket)
            except KVTransportError as error:
                # The transfer drains all the same; only its end comes later.
                log.warning("cancel of post %d failed: %s", ticket, error)

    def cancel(self, transfer: Transfer) -> None:
        """A user's cancel; raises ``UnsupportedError`` when the backend has none."""
        if transfer.state.terminal or transfer.state is TransferState.DRAINING:
            return
        if self._capabilities.cancel == "none":
            raise UnsupportedError(
                "this backend cannot cancel; the transfer goes on", capability="cancel"
            )
        self.drain(transfer, TransferCancelledError("cancelled by its user"))

    def _settle(self, transfer: Transfer) -> None:
        """End the transfer if nothing of it is open any more."""
        if transfer.open_tickets or transfer.parts or transfer.state.terminal:
            return
        if not transfer.dropped_parts:
            transfer.error = None
            self._finish(transfer, TransferState.DONE)
        elif transfer.failure is not None:
            transfer.error = transfer.failure
            self._finish(transfer, TransferState.FAILED)
        elif isinstance(transfer.error, TransferCancelledError):
            self._finish(transfer, TransferState.CANCELLED)
        else:
            self._finish(transfer, TransferState.FAILED)

    def _finish(self, transfer: Transfer, state: TransferState) -> None:
        transfer.state = state
        transfer.finished_s = monotonic()
        self._forget(transfer)
        if transfer.error is not None:
            log.warning(
                "transfer %d %s of %d bytes with peer %s ended %s: %s",
                transfer.transfer_id,
                transfer.op.value,
                transfer.nbytes,
                transfer.peer.name,
                state.text,
                transfer.error,
            )
        self._on_finished(transfer)

    def _forget(self, transfer: Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        for region in transfer.regions:
            region.users -= 1
        transfer.peer.in_flight -= 1

    def quarantine(self, transfer: Transfer) -> None:
        """Give up waiting for quiet: the memory is kept for ever."""
        for ticket in transfer.open_tickets:
            del self._by_ticket[ticket]
            self._abandoned.add(ticket)
        for part in transfer.open_tickets.values():
            for region in transfer.regions:
                mine = part.local_region == region.region_id
                region.quarantined_bytes += int(part.nbytes[mine].sum())
        transfer.peer.quarantined = True
        transfer.error = transfer.failure or transfer.error
        self._finish(transfer, TransferState.QUARANTINED)

    def sweep(self, now: float) -> None:
        """Act on deadlines that have passed."""
        for transfer in self.of_peer(None):
            if transfer.state is TransferState.DRAINING:
                if now >= transfer.drain_until:
                    self.quarantine(transfer)
            elif now >= transfer.deadline:
                self.drain(transfer, self.timeout_error(transfer, now))
        self.next_check = min(
            (
                t.drain_until if t.state is TransferState.DRAINING else t.deadline
                for t in self._transfers.values()
            ),
            default=NEVER,
        )

    @staticmethod
    def timeout_error(transfer: Transfer, now: float) -> TransferTimeoutError:
        """The error of a transfer that is not finished ``now``."""
        return TransferTimeoutError(
            f"{transfer.op.value} of {transfer.nbytes} bytes from or to peer "
            f"{transfer.peer.name!r} is not finished after {now - transfer.started_s:.3f} s; "
            "it drains and its memory stays pinned",
            peer=transfer.peer.name,
            transfer_id=transfer.transfer_id,
        )
