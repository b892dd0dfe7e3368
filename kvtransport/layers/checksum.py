"""End-to-end verification: every transfer is read back and compared.

After a read the same remote bytes are read once more into scratch memory, after
a write the written bytes are read back; CRC-32 of both sides must agree, else
the transfer fails with ``IntegrityError``.  This finds dropped tails, misplaced
blocks, corruption on the way, and memory that its owner changed during the
read.  It costs a second transfer: a tool for finding faults, not for production.

A write's notification is sent after its verification.  Host memory only.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from kvtransport import lifetime
from kvtransport.backend import Backend, Blocks, Completion, Event, Op, RegionSpec
from kvtransport.capabilities import Capabilities
from kvtransport.errors import BackpressureError, IntegrityError, KVTransportError
from kvtransport.layers.base import Layer
from kvtransport.plan import EMPTY


@dataclass(slots=True)
class _Job:
    """A transfer from its data to its verification to its notification."""

    ticket: int
    op: Op
    peer_id: int
    blocks: Blocks
    notify: bytes | None
    stage: str = "data"


class ChecksumLayer(Layer):
    """Wraps ``inner``, which must be able to read; verifies one transfer at a time.

    ``scratch_bytes`` bounds the memory for reading back, and with it the size of
    one post; the core cuts larger transfers.
    """

    SCRATCH = Layer.PRIVATE + 2

    def __init__(self, inner: Backend, scratch_bytes: int = 64 << 20) -> None:
        super().__init__(inner)
        self._scratch = np.zeros(scratch_bytes, np.uint8)
        self._specs: dict[int, RegionSpec] = {}
        self._jobs: dict[int, _Job] = {}
        self._verify: deque[_Job] = deque()
        self._checking: dict[int, _Job] = {}
        self._tickets = count(Layer.PRIVATE)
        self.verified = 0
        self.mismatches = 0

    def capabilities(self, config: Any) -> Capabilities:  # type: ignore[override]
        inner = self.inner.capabilities(config)
        size = len(self._scratch)
        return replace(
            inner,
            ops=inner.ops if inner.can_read else frozenset(),
            memory=frozenset(pair for pair in inner.memory if pair[0] == "host"),
            max_transfer_bytes=min(inner.max_transfer_bytes or size, size),
        )

    def open(self, name: str, config: Any) -> None:
        super().open(name, config)
        memory = self._scratch
        spec = RegionSpec(
            self.SCRATCH, memory.ctypes.data, memory.nbytes, access=frozenset(), owner=memory
        )
        try:
            self.inner.register(spec)
        except KVTransportError:
            self.inner.close()
            raise

    def register(self, region: RegionSpec) -> None:
        super().register(region)
        self._specs[region.region_id] = region

    def deregister(self, region_id: int) -> None:
        super().deregister(region_id)
        del self._specs[region_id]

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if not len(blocks):
            super().post(ticket, op, peer_id, blocks, notify)
            return
        self._jobs[ticket] = _Job(ticket, op, peer_id, blocks, notify)
        try:
            super().post(ticket, op, peer_id, blocks, None)
        except KVTransportError:
            del self._jobs[ticket]
            raise

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        for event in self.inner.poll():
            events += self._advance(event) if isinstance(event, Completion) else [event]
        events += self._start_next()
        return events

    def _advance(self, event: Completion) -> list[Event]:
        job = self._checking.pop(event.ticket, None)
        if job is not None:
            return self._checked(job, event)
        job = self._jobs.get(event.ticket)
        if job is None:
            return [event]
        if event.error is not None or event.cancelled or job.stage == "notify":
            del self._jobs[event.ticket]
            return [event]
        self._verify.append(job)
        return []

    def _start_next(self) -> list[Event]:
        """Read back the next transfer, unless one is being verified."""
        if self._checking or not self._verify:
            return []
        job = self._verify[0]
        packed = np.cumsum(job.blocks.nbytes) - job.blocks.nbytes
        where = np.full(len(job.blocks), self.SCRATCH, np.int64)
        back = replace(job.blocks, local_region=where, local_offset=packed)
        ticket = next(self._tickets)
        try:
            self.inner.post(ticket, Op.READ, job.peer_id, back, None)
        except BackpressureError:
            return []
        except KVTransportError as error:
            self._verify.popleft()
            return self._end(job, error)
        self._verify.popleft()
        self._checking[ticket] = job
        return []

    def _checked(self, job: _Job, event: Completion) -> list[Event]:
        if event.error is not None or event.cancelled:
            return self._end(job, event.error or IntegrityError("reading back was cancelled"))
        wrong = self._compare(job.blocks)
        if wrong is not None:
            self.mismatches += 1
            return self._end(job, IntegrityError(wrong))
        self.verified += 1
        return self._end(job, None)

    def _end(self, job: _Job, error: KVTransportError | None) -> list[Event]:
        """Report the end, or send the notification first; its end is then the end."""
        if error is None and job.notify is not None:
            job.stage = "notify"
            try:
                self.inner.post(job.ticket, job.op, job.peer_id, EMPTY, job.notify)
            except KVTransportError as failed:
                error = failed
            else:
                return []
        del self._jobs[job.ticket]
        return [Completion(job.ticket, error)]

    def _compare(self, blocks: Blocks) -> str | None:
        """Say where local memory and what was read back differ, or None."""
        at = 0
        for region_id, offset, nbytes in zip(
            blocks.local_region.tolist(),
            blocks.local_offset.tolist(),
            blocks.nbytes.tolist(),
            strict=True,
        ):
            local = (ctypes.c_char * nbytes).from_address(self._specs[region_id].address + offset)
            mine, theirs = zlib.crc32(local), zlib.crc32(self._scratch[at : at + nbytes].data)
            if mine != theirs:
                return (
                    f"{nbytes} bytes at offset {offset} of local region {region_id} have CRC-32 "
                    f"{mine:08x}, the peer's have {theirs:08x}"
                )
            at += nbytes
        return None

    def close(self) -> None:
        if self._jobs:
            lifetime.keep_for_ever(self._scratch)
        super().close()

    def counters(self) -> Mapping[str, int]:
        mine = {"checksum_verified": self.verified, "checksum_mismatches": self.mismatches}
        return {**self.inner.counters(), **mine}
