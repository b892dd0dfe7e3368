"""Saboteurs of the core: what it promises above any backend must be testable as well.

Each replaces one function of ``kvtransport`` in its own process.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np

from kvtransport.backend import Op
from kvtransport.capabilities import Ops
from kvtransport.errors import (
    KVTransportError,
    StaleDescriptorError,
    TransferFailedError,
)
from kvtransport.region import Region
from kvtransport.transfer import Transfer, TransferState
from kvtransport_conformance.saboteurs.base import BrokenCore, always, patches, saboteur

# Registration -----------------------------------------------------------------------


@saboteur("REG-01")
class ForgivesDoubleDeregister(BrokenCore):
    """Accepts the second deregistration of a region."""

    def deregister(self, region: Region, drain_s: float = 0.0) -> None:
        with contextlib.suppress(StaleDescriptorError):
            super().deregister(region, drain_s)


@saboteur("REG-02", "REG-06")
class AcceptsNothing(BrokenCore):
    """Registers an empty buffer as one of a byte."""

    def register(self, buffer: Any, **options: Any) -> Region:
        if getattr(buffer, "nbytes", 1) == 0:
            buffer = np.zeros(1, np.uint8)
        return super().register(buffer, **options)


@saboteur("REG-06")
class KeepsPartialBatch(BrokenCore):
    """Leaves the first regions of a failed batch registered."""

    def register_many(self, buffers: Any, **options: Any) -> dict[str, Region]:
        return {name: self.register(buffer, name=name, **options)
                for name, buffer in buffers.items()}  # fmt: skip


@saboteur("CMP-05", "REG-07")
class DeregistersBusy(BrokenCore):
    """Returns from deregister although the transfer goes on."""

    def deregister(self, region: Region, drain_s: float = 0.0) -> None:
        if not region.users:
            super().deregister(region, drain_s)


@saboteur("REG-08")
class DropsBuffers(BrokenCore):
    """Keeps no reference to what is registered."""

    def register(self, buffer: Any, **options: Any) -> Region:
        if isinstance(buffer, np.ndarray) and buffer.nbytes and buffer.flags.writeable:
            buffer = (buffer.ctypes.data, buffer.nbytes, None)
        return super().register(buffer, **options)


@saboteur("REG-10")
class IgnoresReadOnly(BrokenCore):
    """Takes a read-only buffer for a writable one."""

    def register(self, buffer: Any, **options: Any) -> Region:
        if isinstance(buffer, np.ndarray) and buffer.nbytes and not buffer.flags.writeable:
            buffer = (buffer.ctypes.data, buffer.nbytes, buffer)
        return super().register(buffer, **options)


@saboteur("REG-11")
class AcceptsAnyKind(BrokenCore):
    """Takes an unknown kind of memory for host memory."""

    def register(self, buffer: Any, **options: Any) -> Region:
        return super().register(buffer, **{**options, "kind": "host"})


# Descriptors ------------------------------------------------------------------------


@saboteur("DSC-06")
class CutsToShortest(BrokenCore):
    """Cuts vectors of unequal length to the shortest, and blocks to the smaller ones."""

    patches = patches(
        error=("kvtransport.planner:LengthMismatchError", lambda _: _SwallowedError),
    )

    def prepare(self, op: Op, peer: Any, pairs: Any) -> Any:
        try:
            return super().prepare(op, peer, pairs)
        except _SwallowedError:
            return super().prepare(op, peer, [])


class _SwallowedError(KVTransportError):
    """What ``CutsToShortest`` swallows."""


@saboteur("DSC-07")
class RefusesNothing(BrokenCore):
    """Takes a transfer of nothing for an error."""

    def prepare(self, op: Op, peer: Any, pairs: Any) -> Any:
        found = super().prepare(op, peer, pairs)
        if not found.nbytes:
            raise TransferFailedError("nothing to do")
        return found


@saboteur("DSC-08")
class AllowsOverlap(BrokenCore):
    """Does not look whether two descriptors write the same bytes."""

    patches = patches(
        long=("kvtransport.planner:_Planner._check_overlap", always(None)),
        short=("kvtransport.short_plan:_Columns._overlapping", always(False)),
    )


def _merge_wrongly(original: Any) -> Any:
    def index_runs(local: Any, remote: Any) -> Any:
        runs = original(local, remote)
        if len(runs.length) > 1:
            runs.length[-1] = max(1, runs.length[-1] - 1)
            runs.remote[-1] = runs.remote[-2]
        return runs

    return index_runs


@saboteur("DSC-09")
class MergesWrongly(BrokenCore):
    """Puts the last run of blocks where the one before it went."""

    patches = patches(
        runs=("kvtransport.planner:index_runs", _merge_wrongly),
        short=("kvtransport.planner:short_plan", always(None)),
    )


@saboteur("RD-06")
class AllowsAnyOp(BrokenCore):
    """Reads although the backend does not declare it."""

    def __init__(self, backend: Any, **options: Any) -> None:
        super().__init__(backend, **options)
        both: Ops = frozenset({"read", "write"})
        self.capabilities = replace(self.capabilities, ops=both)


@saboteur("SEC-01")
class TrustsBounds(BrokenCore):
    """Posts ranges that end outside their region."""

    patches = patches(
        ranges=("kvtransport.planner:_check_ranges", always(None)),
    )


# Completion -------------------------------------------------------------------------


@saboteur("CMP-04", "CMP-10", "INT-04")
class EatsSiblings(BrokenCore):
    """Throws away the events of others while it waits for one transfer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        inner = self._posting.step

        def step(transfer: Transfer) -> bool:
            ended = inner(transfer)
            self._events.take()
            return ended

        self._posting.step = step  # type: ignore[method-assign]


def _finish_at_once(original: Any) -> Any:
    def drain(self: Any, transfer: Transfer, reason: Any) -> None:
        original(self, transfer, reason)
        if not transfer.state.terminal:
            for ticket in list(transfer.open_tickets):
                del self._by_ticket[ticket]
                self._abandoned.add(ticket)
            transfer.open_tickets.clear()
            transfer.dropped_parts = True
            self._settle(transfer)

    return drain


@saboteur("CMP-05", "NTF-10", perhaps=["CMP-06", "NTF-04"])
class FreesOnTimeout(BrokenCore):
    """Calls a late transfer ended, and its memory free, while the backend still works."""

    patches = patches(drain=("kvtransport.inflight:InFlight.drain", _finish_at_once))


@saboteur("CMP-07", "CON-07", "CON-09", "TD-06")
class StaysOpen(BrokenCore):
    """Forgets after closing that it is closed."""

    patches = patches(check=("kvtransport.gate:Gate.check", always(None)))


@saboteur("CMP-08")
class Miscounts(BrokenCore):
    """Counts every transfer's bytes twice."""

    patches = patches(
        finished=(
            "kvtransport.stats:Counters.finished",
            lambda original: (
                lambda self, transfer: [original(self, transfer) for _ in range(2)] and None
            ),
        ),
    )


@saboteur("CMP-10")
class FailsTwice(BrokenCore):
    """Reports the failure of a transfer with several parts twice."""

    def _on_finished(self, transfer: Transfer) -> None:
        super()._on_finished(transfer)
        if transfer.state is TransferState.FAILED and transfer.descriptors > 4:
            super()._on_finished(transfer)


@saboteur("NTF-10", "PD-03")
class WaitsForEver(BrokenCore):
    """Never looks at deadlines."""

    patches = patches(sweep=("kvtransport.inflight:InFlight.sweep", always(None)))


def _lose_failures(original: Any) -> Any:
    def complete(self: Any, event: Any) -> None:
        if event.error is None:
            original(self, event)

    return complete


@saboteur("CAN-06", "CMP-05", "INT-04", "MD-09", "MD-11", "NTF-10", "PD-03", perhaps=["PD-01"])
class LosesFailures(BrokenCore):
    """Tells nobody that a transfer failed, and looks at no deadline."""

    patches = patches(
        complete=("kvtransport.inflight:InFlight.complete", _lose_failures),
        drain=("kvtransport.inflight:InFlight.drain", always(None)),
    )


def _expect_fifo(original: Any) -> Any:
    def complete(self: Any, event: Any) -> None:
        transfer = self._by_ticket.get(event.ticket)
        if transfer is None or event.ticket == min(transfer.open_tickets):
            original(self, event)

    return complete


@saboteur("ORD-05", perhaps=["CMP-10"])
class ExpectsFifo(BrokenCore):
    """Ignores parts of a transfer that end out of order."""

    patches = patches(complete=("kvtransport.inflight:InFlight.complete", _expect_fifo))


@saboteur("CMP-10", "CON-05")
class FullIsFatal(BrokenCore):
    """Reports a full queue as a failed transfer."""

    patches = patches(
        room=("kvtransport.inflight:BackpressureError", lambda _: TransferFailedError),
    )


# Cancel -----------------------------------------------------------------------------


def _cancel_finished(original: Any) -> Any:
    def cancel(self: Any, transfer: Transfer) -> None:
        if transfer.state is TransferState.DONE:
            transfer.state = TransferState.CANCELLED
        original(self, transfer)

    return cancel


@saboteur("CAN-03", "CMP-07")
class CancelsTheDone(BrokenCore):
    """Calls a finished transfer cancelled."""

    patches = patches(cancel=("kvtransport.posting:Posting.cancel", _cancel_finished))


@saboteur("CAN-05")
class CancelsInSilence(BrokenCore):
    """Says nothing when the backend cannot cancel."""

    patches = patches(
        cancel=(
            "kvtransport.inflight:InFlight.cancel",
            lambda original: (
                lambda self, transfer: (
                    None if self._capabilities.cancel == "none" else original(self, transfer)
                )
            ),
        ),
    )


def _keep_parts(original: Any) -> Any:
    def drain(self: Any, transfer: Transfer, reason: Any) -> None:
        while transfer.parts and not transfer.state.terminal:
            self._post(transfer, transfer.parts[0])
        original(self, transfer, reason)

    return drain


@saboteur("CAN-06")
class PostsAfterCancel(BrokenCore):
    """Posts the waiting parts of a transfer when it is cancelled."""

    patches = patches(drain=("kvtransport.inflight:InFlight.drain", _keep_parts))
