"""Answering one connection's requests: the target side of every transfer but vm READ.

Bounds, access and registration are checked here, at the memory's owner, for
every request and again for every chunk that is copied.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import KVTransportError, ProtocolError, StaleDescriptorError
from kvtransport_backends.host._counters import Counters
from kvtransport_backends.host._handshake import Caller
from kvtransport_backends.host._regions import LocalRegions
from kvtransport_backends.host._stream import Stream
from kvtransport_backends.host._table import Need
from kvtransport_backends.host._vectors import Vectors
from kvtransport_backends.host._vm import VmMemory, VmRefusedError
from kvtransport_backends.host._wire import (
    DESCRIPTOR,
    HEAD_BYTES,
    Descriptors,
    Head,
    Request,
    Status,
    decode_descriptors,
    decode_head,
    status_of,
)

_log = logging.getLogger("kvtransport.backends.host")

_IDLE_SLICE_S = 60.0
_COPY_BYTES = 1024 * 1024


class Inbox(Protocol):
    """Where notifications go; implemented by the backend."""

    def deliver(self, caller: Caller, payload: bytes) -> Status:
        """Accept, or say why not."""


class Served:
    """A thread that answers one authenticated caller until it goes away."""

    def __init__(
        self,
        stream: Stream,
        caller: Caller,
        pid: int,
        regions: LocalRegions,
        inbox: Inbox,
        counters: Counters,
        on_end: Callable[[Served], None],
    ) -> None:
        self._stream = stream
        self._caller = caller
        self._pid = pid
        self._regions = regions
        self._inbox = inbox
        self._counters = counters
        self._on_end = on_end
        self._source: VmMemory | None = None
        self._stopping = False
        stream.between = self._check_stopping
        self.thread = threading.Thread(target=self._run, name="kvt-host-serve", daemon=True)

    def stop(self) -> None:
        """End the connection; the thread finishes the chunk it is copying."""
        self._stopping = True
        self._stream.wake()

    def abandon(self) -> None:
        """In a forked child: let go of the descriptors, touch nothing else."""
        self._stream.abandon()
        if self._source:
            self._source.close()

    def _check_stopping(self) -> None:
        if self._stopping:
            raise ConnectionAbortedError("the agent is closing")

    def _run(self) -> None:
        try:
            while self._answer():
                pass
        except (ConnectionError, TimeoutError) as error:
            _log.debug("host backend connection ended: %s", error)
        except (ProtocolError, OSError) as error:
            _log.warning("host backend dropped a connection: %s", error)
        finally:
            self._stream.close()
            if self._source:
                self._source.close()
            self._on_end(self)

    def _answer(self) -> bool:
        """Answer one request; False when the caller hung up between two."""
        while not self._stream.wait_readable(_IDLE_SLICE_S):
            continue
        first = self._stream.socket.recv(1)
        if not first:
            return False
        head = decode_head(first + self._stream.receive(HEAD_BYTES - 1))
        if head.request is Request.NOTIFY:
            payload = bytes(self._stream.receive(head.payload))
            self._reply(self._inbox.deliver(self._caller, payload))
            return True
        data = bytes(self._stream.receive(head.count * DESCRIPTOR.itemsize))
        rows = decode_descriptors(data, head)
        if head.request is Request.READ:
            self._serve_read(rows)
        elif head.request is Request.WRITE:
            self._serve_write(head, rows)
        else:
            self._reply(self._pull(rows))
        return True

    def _reply(self, status: Status) -> None:
        self._stream.send(bytes((status,)))

    def _serve_read(self, rows: Descriptors) -> None:
        try:
            ids, vectors = self._locate(rows, "read")
        except KVTransportError as error:
            self._reply(status_of(error))
            return
        self._reply(Status.OK)
        status = _guarded(
            lambda: self._stream.send_vectors(vectors, lambda: self._regions.using(ids))
        )
        self._stream.send_zeros(vectors.remaining)
        self._reply(status)
        self._counters.add("served_read_bytes", vectors.done)

    def _serve_write(self, head: Head, rows: Descriptors) -> None:
        try:
            ids, vectors = self._locate(rows, "write")
        except KVTransportError as error:
            self._stream.discard(head.payload)
            self._reply(status_of(error))
            return
        status = _guarded(
            lambda: self._stream.receive_vectors(vectors, lambda: self._regions.using(ids))
        )
        self._counters.add("served_write_bytes", vectors.done)
        self._stream.discard(vectors.remaining)
        self._reply(status)

    def _locate(self, rows: Descriptors, need: Need) -> tuple[list[int], Vectors]:
        table = self._regions.table
        lengths = np.ascontiguousarray(rows["nbytes"])
        used, addresses = table.locate(rows["region"], rows["offset"], lengths, need)
        return table.region_ids(used).tolist(), Vectors(addresses, lengths)

    def _pull(self, rows: Descriptors) -> Status:
        """Fetch a WRITE's bytes from the caller's memory: vm speed, our checks."""
        source = self._caller_memory()
        if source is None:
            return Status.CANNOT_PULL
        try:
            ids, local = self._locate(rows, "write")
        except KVTransportError as error:
            return status_of(error)
        remote = Vectors(rows["source"], np.ascontiguousarray(rows["nbytes"]))
        status = _guarded(lambda: self._copy(source, local, remote, ids))
        self._counters.add("served_write_bytes", local.done)
        return status

    def _copy(self, source: VmMemory, local: Vectors, remote: Vectors, ids: list[int]) -> None:
        none: NDArray[np.intp] = np.empty(0, np.intp)
        while local.remaining:
            self._check_stopping()
            source.check(none, none)  # a caller that closed must not be read any more
            with self._regions.using(ids):
                source.step(local, remote, _COPY_BYTES)

    def _caller_memory(self) -> VmMemory | None:
        if self._source is None and self._pid and self._caller.guard_address:
            try:
                self._source = VmMemory(
                    self._pid, self._caller.guard_address, self._caller.agent_id
                )
            except VmRefusedError as error:
                _log.debug("host backend cannot pull from its caller: %s", error)
        return self._source


def _guarded(copy: Callable[[], None]) -> Status:
    """Run ``copy``; what ends it early, short of the connection, is the answer."""
    try:
        copy()
    except StaleDescriptorError:
        return Status.STALE
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return Status.FAULT
    return Status.OK
