"""One thread per peer that carries out its transfers and notices its end.

A lane of its own keeps a frozen peer from holding up the others.  Requests to
one peer run one after the other; copies of all lanes together are limited by
``copy_threads``, because each of them keeps a core busy.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Op
from kvtransport.errors import (
    BackendContractError,
    KVTransportError,
    PeerError,
    PeerLostError,
    TransferFailedError,
)
from kvtransport_backends.host._body import Body
from kvtransport_backends.host._channel import Channel, connect
from kvtransport_backends.host._counters import Counters
from kvtransport_backends.host._handshake import Credentials
from kvtransport_backends.host._job import Job
from kvtransport_backends.host._plan import Plan
from kvtransport_backends.host._vm import VmMemory
from kvtransport_backends.host._wake import Wake
from kvtransport_backends.host._wire import Status
from kvtransport_backends.host.config import HostConfig

_log = logging.getLogger("kvtransport.backends.host")

_SLICE_MS = 1000
_NO_SLOTS: NDArray[np.intp] = np.empty(0, np.intp)


class Events(Protocol):
    """Where a lane reports; implemented by the backend."""

    def finish(self, job: Job, error: KVTransportError | None) -> None:
        """The job is over and quiet."""

    def lose(self, job: Job) -> None:
        """The job ends here, but it cannot be proved quiet."""

    def peer_down(self, lane: Lane, error: KVTransportError) -> None:
        """The peer is gone."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all lanes of one backend have in common."""

    own: Credentials
    config: HostConfig
    counters: Counters
    events: Events
    copy_slots: AbstractContextManager[object]


class _ClosingError(Exception):
    """The lane was told to stop."""


class Lane:
    """Transfers with one peer.  ``vm`` is None when it is reached over TCP only."""

    def __init__(
        self, peer_id: int, body: Body, vm: VmMemory | None, channel: Channel | None, shared: Shared
    ) -> None:
        self.peer_id = peer_id
        self.vm = vm
        self.lost: KVTransportError | None = None
        self._body = body
        self._channel = channel
        self._shared = shared
        self._queue: deque[Job] = deque()
        self._stopping = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=f"kvt-host-peer-{peer_id}")
        self._thread.daemon = True
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; any thread."""
        self._queue.append(job)
        self._wake.set()

    def read_inline(self, job: Job) -> bool:
        """Carry out a small READ in the calling thread, if the peer's memory is read."""
        if not self.vm or not job.begin():
            return False
        error: KVTransportError | None = None
        try:
            self.vm.read(job.plan, self._shared.config.chunk_bytes)
        except KVTransportError as raised:
            error = raised
        else:
            self._shared.counters.add("vm_read_bytes", job.plan.total)
        self._shared.events.finish(job, error)
        return True

    def stop(self) -> None:
        """Tell the thread to end after the chunk it is moving; does not wait."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; returns whether it ended."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Let go of every descriptor; all that a forked child may do."""
        self._wake.abandon()
        if self._channel:
            self._channel.stream.abandon()
        if self.vm:
            self.vm.close()

    # -- the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._queue:
                    self._carry_out(self._queue.popleft())
                else:
                    self._idle()
            self._fail_queue(PeerLostError("the agent was closed", backend="host"))
        finally:
            self._close_channel()
            if self.vm:
                self.vm.close()
            self._wake.close()

    def _idle(self) -> None:
        """Sleep until a job, the peer's death or the end of its connection."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self.vm and not self.lost:
            poller.register(self.vm.pidfd, select.POLLIN)
        if self._channel:
            poller.register(self._channel.stream.socket, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(_SLICE_MS)}
        if self._wake.fd in ready:
            self._wake.clear()
        elif self.vm and self.vm.pidfd in ready:
            self._down(PeerLostError(f"process {self.vm.pid} died", backend="host"))
        elif ready:
            self._connection_ended()

    def _connection_ended(self) -> None:
        """The peer hung up while nothing was asked: find out whether it is gone."""
        self._close_channel()
        try:
            if self.vm:
                self.vm.check(_NO_SLOTS, _NO_SLOTS)
                return
            with self._connected(self._check_stopping):
                return
        except KVTransportError as error:
            self._down(error)

    def _down(self, error: KVTransportError) -> None:
        self.lost = error if self.vm else None
        self._close_channel()
        self._fail_queue(error)
        self._shared.events.peer_down(self, error)

    def _fail_queue(self, error: KVTransportError) -> None:
        while self._queue:
            job = self._queue.popleft()
            if job.begin():
                self._shared.events.finish(job, error)

    # -- one job ---------------------------------------------------------

    def _carry_out(self, job: Job) -> None:
        if not job.begin():
            return
        error, quiet = self._attempt(job)
        if not quiet and job.op is Op.WRITE:
            self._shared.events.lose(job)  # the peer may still be storing a batch
            return
        if isinstance(error, PeerError):
            self._fail_queue(error)
        self._shared.events.finish(job, error)
        if error and isinstance(error.native, ConnectionError) and not self.vm:
            self._connection_ended()

    def _attempt(self, job: Job) -> tuple[KVTransportError | None, bool]:
        """Carry out ``job``: its error, and whether the peer is surely done with it."""
        try:
            self._move(job)
        except _ClosingError:
            return TransferFailedError("the agent was closed", backend="host"), False
        except (KVTransportError, OSError) as raised:
            return _translated(raised), True
        except Exception as raised:  # noqa: BLE001  # the edge of the progress loop
            # A mistake of ours ends this transfer, not the thread.
            _log.exception("host transfer %d met a bug", job.ticket)
            text = f"{type(raised).__name__}: {raised}"
            return BackendContractError(text, backend="host", native=raised), False
        return None, True

    def _move(self, job: Job) -> None:
        def between() -> None:
            self._check_stopping()
            job.check()

        if not job.plan.total:
            between()  # a notification without data
        elif job.op is Op.WRITE:
            self._write(job)
        elif self.vm:
            self._vm_read(self.vm, job.plan, between)
        else:
            self._tcp_read(job.plan, between)
        if job.notify is not None:
            self._notify(job.notify)

    def _vm_read(self, vm: VmMemory, plan: Plan, between: Callable[[], None]) -> None:
        shared = self._shared
        vm.read(plan, shared.config.chunk_bytes, shared.copy_slots, between)
        shared.counters.add("vm_read_bytes", plan.total)

    def _tcp_read(self, plan: Plan, between: Callable[[], None]) -> None:
        with self._connected(between) as channel:
            channel.read(plan)
        self._shared.counters.add("tcp_read_bytes", plan.total)

    def _write(self, job: Job) -> None:
        for rows, vectors in job.plan.batches():
            # A batch that the peer began cannot be called back: cancel acts between.
            job.check()
            with self._connected(self._check_stopping) as channel, self._patience(channel):
                pulled = channel.can_pull
                channel.write(rows, vectors)
                if pulled and not channel.can_pull:
                    self._shared.counters.add("pull_refused")
                name = "vm_write_bytes" if channel.can_pull else "tcp_write_bytes"
                self._shared.counters.add(name, vectors.total)

    def _notify(self, payload: bytes) -> None:
        with self._connected(self._check_stopping) as channel, self._patience(channel):
            channel.notify(payload)
        self._shared.counters.add("notifications_sent")

    @contextmanager
    def _patience(self, channel: Channel) -> Iterator[None]:
        """After an error of ours, wait until the peer cannot act on what it was sent.

        It may be frozen with our request in its socket.  Once awake it meets the
        end of our stream: an unfinished request is dropped, a finished one is
        carried out and answered, and its own end comes after its last copy.  Only
        then may anybody call this transfer over.
        """
        try:
            yield
        except ConnectionError:
            raise  # the peer's end is closed, which it does after its last copy
        except OSError as error:
            lost = _translated(error)
            channel.stream.end_writing()
            answer = b""
            while not (self.vm and not self.vm.alive()):
                self._check_stopping()
                self._fail_queue(lost)
                more = channel.stream.receive_some(_SLICE_MS / 1000)
                if more == b"":
                    break
                answer += more or b""
            self._close_channel()
            if answer != bytes((Status.OK,)):
                raise lost from error

    @contextmanager
    def _connected(self, between: Callable[[], None]) -> Iterator[Channel]:
        """The peer's channel, closed again when its use fails.

        Closing is what makes a failed READ quiet: nothing can land after it.
        """
        if not self._channel:
            shared = self._shared
            try_local = self.vm is not None
            self._channel = connect(self._body, shared.own, shared.config, try_local=try_local)
        self._channel.stream.between = between
        try:
            yield self._channel
        except BaseException:
            self._close_channel()
            raise

    def _close_channel(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None

    def _check_stopping(self) -> None:
        if self._stopping:
            raise _ClosingError


def _translated(error: Exception) -> KVTransportError:
    if isinstance(error, KVTransportError):
        return error
    if isinstance(error, ConnectionError | TimeoutError):
        return PeerLostError(f"the peer was lost: {error}", backend="host", native=error)
    return TransferFailedError(f"local memory or socket: {error}", backend="host", native=error)
