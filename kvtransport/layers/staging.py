"""Host staging: local device memory that the inner backend cannot register.

A transfer between device memory here and host memory there goes through a slot
of a pinned host pool: a read lands in the slot and is then copied to the device,
a write is copied to the slot first.  The pool is bounded.  The core cuts large
transfers into posts of one slot, so any size works and moves in waves; a post
beyond one slot is refused at once with the size it needs.  A post that finds
every slot taken waits in turn, up to ``wait_s``, and then fails.

Device regions are reachable from this side only: no peer can read memory that
nothing can register, so they must be registered with ``access=""``.  What peers
shall read has to lie in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np

from kvtransport import lifetime
from kvtransport.backend import Backend, Blocks, Completion, Event, Op, RegionSpec
from kvtransport.capabilities import Capabilities
from kvtransport.errors import (
    BackpressureError,
    DescriptorError,
    KVTransportError,
    TransferFailedError,
    TransferTimeoutError,
    UnsupportedError,
)
from kvtransport.layers.base import Layer
from kvtransport.layers.staging_plan import Bytes, Copy, StagingJob, StagingPlan


class StagingLayer(Layer):
    """Wraps ``inner`` and stages the kinds that ``plan`` names."""

    POOL = Layer.PRIVATE + 1

    def __init__(self, inner: Backend, plan: StagingPlan) -> None:
        super().__init__(inner)
        self.plan = plan
        self._pool: Bytes = np.empty(0, np.uint8)
        self._free = list(range(plan.slots))
        self._device: dict[int, RegionSpec] = {}
        self._jobs: dict[int, StagingJob] = {}
        self._waiting: deque[StagingJob] = deque()
        self._events: list[Event] = []

    def capabilities(self, config: Any) -> Capabilities:  # type: ignore[override]
        inner = self.inner.capabilities(config)
        reachable = ("host", "host") in inner.memory
        pairs = {(kind, "host") for kind in self.plan.kinds if reachable}
        largest = min(inner.max_transfer_bytes or self.plan.slot_bytes, self.plan.slot_bytes)
        return replace(inner, memory=inner.memory | pairs, max_transfer_bytes=largest)

    @property
    def free_slots(self) -> int:
        """Slots that no transfer uses."""
        return len(self._free)

    def open(self, name: str, config: Any) -> None:
        super().open(name, config)
        self._pool = np.zeros(self.plan.slots * self.plan.slot_bytes, np.uint8)
        pool = self._pool
        spec = RegionSpec(self.POOL, pool.ctypes.data, pool.nbytes, access=frozenset(), owner=pool)
        try:
            self.inner.register(spec)
        except KVTransportError:
            self.inner.close()
            raise

    def register(self, region: RegionSpec) -> None:
        if region.kind not in self.plan.kinds:
            super().register(region)
            return
        if region.access:
            raise UnsupportedError(
                f"peers cannot reach {region.kind!r} memory through host staging; register it "
                "with access='' and what they shall read in host memory",
                capability="memory",
            )
        self._device[region.region_id] = region

    def deregister(self, region_id: int) -> None:
        if self._device.pop(region_id, None) is None:
            super().deregister(region_id)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        staged = np.isin(blocks.local_region, list(self._device)) if self._device else None
        if staged is None or not staged.any():
            super().post(ticket, op, peer_id, blocks, notify)
            return
        if not staged.all():
            raise DescriptorError("one transfer cannot mix staged and direct local regions")
        if blocks.total_bytes > self.plan.slot_bytes:
            raise DescriptorError(
                f"transfer needs {blocks.total_bytes} bytes of staging memory and a slot has "
                f"{self.plan.slot_bytes}; raise slot_bytes or move less at once"
            )
        job = StagingJob(ticket, op, peer_id, blocks, notify, monotonic() + self.plan.wait_s)
        if self._free and not self._waiting:
            self._start(job)
        else:
            self._waiting.append(job)

    def _start(self, job: StagingJob) -> None:
        """Take a slot and post; the slot is free again after an error."""
        job.slot = self._free.pop()
        first = job.slot * self.plan.slot_bytes
        packed = np.cumsum(job.blocks.nbytes) - job.blocks.nbytes
        try:
            if job.op is Op.WRITE:
                self._copy(job, self.plan.to_host)
            self.inner.post(
                job.ticket,
                job.op,
                job.peer_id,
                replace(
                    job.blocks,
                    local_region=np.full(len(job.blocks), self.POOL, np.int64),
                    local_offset=packed + np.uint64(first),
                ),
                job.notify,
            )
        except KVTransportError:
            self._free.append(job.slot)
            raise
        self._jobs[job.ticket] = job

    def _copy(self, job: StagingJob, copy: Copy) -> None:
        blocks, at = job.blocks, job.slot * self.plan.slot_bytes
        rows = zip(
            blocks.local_region.tolist(),
            blocks.local_offset.tolist(),
            blocks.nbytes.tolist(),
            strict=True,
        )
        try:
            for region_id, offset, nbytes in rows:
                copy(self._device[region_id], offset, self._pool[at : at + nbytes])
                at += nbytes
        except Exception as error:  # the edge to injected device code
            raise TransferFailedError(f"staging copy failed: {error}", native=error) from error

    def cancel(self, ticket: int) -> None:
        for job in self._waiting:
            if job.ticket == ticket:
                self._waiting.remove(job)
                self._events.append(Completion(ticket, cancelled=True))
                return
        super().cancel(ticket)

    def poll(self) -> Sequence[Event]:
        events = [self._finish(event) for event in self.inner.poll()]
        self._serve()
        events += self._events
        self._events.clear()
        return events

    def _finish(self, event: Event) -> Event:
        if not isinstance(event, Completion) or event.ticket not in self._jobs:
            return event
        job = self._jobs.pop(event.ticket)
        try:
            if event.error is None and not event.cancelled and job.op is Op.READ:
                self._copy(job, self.plan.to_device)
        except TransferFailedError as error:
            event = Completion(event.ticket, error)
        self._free.append(job.slot)
        return event

    def _serve(self) -> None:
        """Start waiting posts in turn; fail those that waited too long."""
        now = monotonic()
        while self._waiting and (self._free or now >= self._waiting[0].give_up_at):
            job = self._waiting.popleft()
            error: KVTransportError | None = None
            if now >= job.give_up_at:
                error = TransferTimeoutError(
                    f"no staging slot became free within {self.plan.wait_s} s; "
                    f"{self.plan.slots} slots of {self.plan.slot_bytes} bytes are in use"
                )
            else:
                try:
                    self._start(job)
                except BackpressureError:
                    self._waiting.appendleft(job)
                    return
                except KVTransportError as failed:
                    error = failed
            if error is not None:
                self._events.append(Completion(job.ticket, error))

    def close(self) -> None:
        if self._jobs:
            # Not quiet: something may still land in the pool after the agent is gone.
            lifetime.keep_for_ever(self._pool)
        self._device.clear()
        super().close()
