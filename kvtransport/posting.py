"""Posting plans, waiting for transfers and cancelling them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from time import monotonic

from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    ConfigError,
    TransferFailedError,
    UnsupportedError,
)
from kvtransport.gate import Gate
from kvtransport.inflight import InFlight
from kvtransport.options import AgentOptions
from kvtransport.peers import PeerTable
from kvtransport.plan import EMPTY, Plan
from kvtransport.progress import Progress
from kvtransport.transfer import Transfer, TransferState
from kvtransport.waiting import Pause, check_duration


class Posting:
    """What transfers ask of their agent; thread-safe, the lock is never held while waiting."""

    def __init__(
        self,
        *,
        gate: Gate,
        lock: threading.RLock,
        capabilities: Capabilities,
        options: AgentOptions,
        peers: PeerTable,
        inflight: InFlight,
        progress: Progress,
        on_finished: Callable[[Transfer], None],
    ) -> None:
        self._gate = gate
        self._lock = lock
        self._capabilities = capabilities
        self._options = options
        self._peers = peers
        self._inflight = inflight
        self._progress = progress
        self._on_finished = on_finished
        self._ids = count(1)

    def post(self, plan: Plan, deadline_s: float | None, notify: bytes | None) -> Transfer:
        """Implements ``Agent.post``."""
        if notify is not None:
            self._check_notify(notify)
        if deadline_s is None:
            deadline_s = self._options.deadline_s
        else:
            check_duration(deadline_s, "deadline_s")
        parts = plan.parts or ((EMPTY,) if notify is not None else ())
        with self._lock:
            if self._gate.state != "open":
                self._gate.check()
            plan.check_current()
            self._peers.check_known(plan.peer)
            now = monotonic()
            transfer = Transfer(
                self,
                transfer_id=next(self._ids),
                op=plan.op,
                peer=plan.peer,
                regions=plan.regions,
                parts=parts,
                nbytes=plan.nbytes,
                descriptors=plan.descriptors,
                notify=notify,
                started_s=now,
                deadline=now + deadline_s,
            )
            if parts:
                self._inflight.submit(transfer)
            else:
                transfer.state = TransferState.DONE
                transfer.finished_s = now
                self._on_finished(transfer)
            return transfer

    def _check_notify(self, payload: object) -> None:
        limits = self._capabilities
        if limits.notify == "none":
            raise UnsupportedError("this backend has no notifications", capability="notify")
        if not isinstance(payload, bytes):
            raise ConfigError(f"notify must be bytes, got {type(payload).__name__}")
        if len(payload) > limits.max_notify_bytes:
            raise UnsupportedError(
                f"notification has {len(payload)} bytes and the backend's limit is "
                f"{limits.max_notify_bytes}",
                capability="max_notify_bytes",
            )

    def wait_for(self, transfer: Transfer, timeout_s: float | None) -> None:
        """Implements ``Transfer.wait``."""
        until = None
        if timeout_s is not None:
            until = monotonic() + check_duration(timeout_s, "timeout_s")
        pause: Pause | None = None
        while not self.step(transfer):
            if until is not None and monotonic() >= until:
                self._give_up(transfer)
                break
            pause = pause or Pause()
            pause()
        if transfer.state is not TransferState.DONE:
            raise transfer.error or TransferFailedError("the transfer failed")

    def step(self, transfer: Transfer) -> bool:
        """Progress once; whether the transfer is terminal."""
        with self._lock:
            if not transfer.state.terminal:
                # A closing agent still drains, and closing ends every transfer.
                self._gate.check_process()
                self._progress.step()
            return transfer.state.terminal

    def _give_up(self, transfer: Transfer) -> None:
        """Begin to drain a transfer that was waited for in vain; raises unless it ended."""
        with self._lock:
            late = self._inflight.timeout_error(transfer, monotonic())
            self._inflight.drain(transfer, late)
            if not transfer.state.terminal:
                raise late

    def cancel(self, transfer: Transfer) -> None:
        """Implements ``Transfer.cancel``."""
        with self._lock:
            if not transfer.state.terminal:
                self._gate.check_process()
                self._inflight.cancel(transfer)
