"""READ on top of WRITE: the reader asks, the owner writes.

For engines that can only write.  A read becomes a message that names the
descriptors; the owner's layer checks them against its own regions, writes the
bytes and sends the answer as the write's notification, which arrives after the
data.  Both sides need the layer, must know each other as peers, and the owner
must poll: the read is no longer one-sided.

An emulated read cannot be cancelled.  When the owner is lost, nothing proves that
its last write is over, so the read drains until the core quarantines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np

from kvtransport.backend import Backend, Blocks, Completion, Event, Notification, Op, RegionSpec
from kvtransport.capabilities import Capabilities
from kvtransport.errors import ConfigError, KVTransportError, TransferFailedError
from kvtransport.layers.base import Layer
from kvtransport.plan import EMPTY

_USER, _ASK, _ANSWER = b"\0", b"\1", b"\2"
_ROW_NBYTES = 5 * 8
_OVERHEAD_NBYTES = 64


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """A read's ticket on the asking side, and five int64 columns."""

    ticket: int
    columns: bytes


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """``error`` is empty when the bytes were written."""

    ticket: int
    error: str


_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(_Ask).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class EmulateReadLayer(Layer):
    """Wraps a backend that can write and notify, and adds reads."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._specs: dict[int, RegionSpec] = {}
        self._reads: dict[int, tuple[int, bytes | None]] = {}
        self._mine: dict[int, tuple[int, int] | None] = {}
        self._tickets = count(Layer.PRIVATE)
        self._answers: list[tuple[int, _Answer]] = []
        self.refused = 0

    def capabilities(self, config: Any) -> Capabilities:  # type: ignore[override]
        inner = self.inner.capabilities(config)
        rows = (inner.max_notify_bytes - _OVERHEAD_NBYTES) // _ROW_NBYTES
        if not inner.can_write or not inner.notify_after_data or rows < 1:
            raise ConfigError("emulated reads need a backend that writes and then notifies")
        return replace(
            inner,
            ops=inner.ops | {"read"},
            cancel="none",
            max_descriptors=min(rows, inner.max_descriptors or rows),
            max_notify_bytes=inner.max_notify_bytes - 1,
        )

    def register(self, region: RegionSpec) -> None:
        # Answers are writes, so the wire must allow what ``access`` may not say; the
        # owner's layer keeps to ``access``.
        super().register(replace(region, access=region.access | {"write"}))
        self._specs[region.region_id] = region

    def deregister(self, region_id: int) -> None:
        super().deregister(region_id)
        del self._specs[region_id]

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if op is Op.WRITE or not len(blocks):
            message = None if notify is None else _USER + notify
            super().post(ticket, Op.WRITE, peer_id, blocks, message)
            return
        columns = np.stack(
            [
                blocks.remote_region,
                blocks.remote_offset.view(np.int64),
                blocks.local_region,
                blocks.local_offset.view(np.int64),
                blocks.nbytes.view(np.int64),
            ]
        )
        ask = _ASK + _encode(_Ask(ticket, columns.tobytes()))
        self._send(peer_id, EMPTY, ask, None)
        self._reads[ticket] = (peer_id, notify)

    def _send(
        self, peer_id: int, blocks: Blocks, message: bytes, asked: tuple[int, int] | None
    ) -> None:
        ticket = next(self._tickets)
        self.inner.post(ticket, Op.WRITE, peer_id, blocks, message)
        self._mine[ticket] = asked

    def cancel(self, ticket: int) -> None:
        """Not supported for reads; ``capabilities`` says so."""

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        for event in self.inner.poll():
            if isinstance(event, Completion) and event.ticket in self._mine:
                self._sent(event)
            elif isinstance(event, Notification):
                events += self._receive(event)
            else:
                events.append(event)
        self._flush()
        return events

    def _sent(self, event: Completion) -> None:
        """One of our own posts ended; an answer that failed is sent again as a refusal."""
        asked = self._mine.pop(event.ticket)
        if event.error is not None and asked is not None:
            peer_id, ticket = asked
            self._answers.append((peer_id, _Answer(ticket, f"owner's write: {event.error}"[:200])))

    def _receive(self, event: Notification) -> list[Event]:
        kind, body = event.payload[:1], event.payload[1:]
        if kind == _USER:
            return [Notification(event.peer_id, body)]
        try:
            if kind == _ASK:
                self._serve(event.peer_id, _decode_ask(body))
            elif kind == _ANSWER:
                return self._answered(event.peer_id, _decode_answer(body))
        except msgspec.MsgspecError:
            self.refused += 1
        return []

    def _serve(self, peer_id: int, ask: _Ask) -> None:
        """Write what a peer asked for, if it may have it."""
        try:
            blocks = self._checked(ask.columns)
            answer = _ANSWER + _encode(_Answer(ask.ticket, ""))
            self._send(peer_id, blocks, answer, (peer_id, ask.ticket))
        except KVTransportError as error:
            self.refused += 1
            self._answers.append((peer_id, _Answer(ask.ticket, str(error)[:200])))

    def _checked(self, columns: bytes) -> Blocks:
        """Decode and bounds-check on the owner's side: the asking side may lie."""
        if not columns or len(columns) % _ROW_NBYTES:
            raise TransferFailedError("malformed read request")
        region, offset, theirs, target, nbytes = np.frombuffer(columns, np.int64).reshape(5, -1)
        size = np.zeros(len(region), np.int64)
        for region_id in set(region.tolist()):
            spec = self._specs.get(region_id)
            if spec is None or "read" not in spec.access:
                raise TransferFailedError(f"region {region_id} is not readable")
            size[region == region_id] = spec.nbytes
        if ((offset < 0) | (nbytes < 1) | (nbytes > size) | (offset > size - nbytes)).any():
            raise TransferFailedError("read request reaches outside its region")
        if (target < 0).any():
            raise TransferFailedError("read request names a negative offset")
        unsigned = (column.astype(np.uint64) for column in (offset, target, nbytes))
        local_offset, remote_offset, length = unsigned
        return Blocks(region.copy(), local_offset, theirs.copy(), remote_offset, length)

    def _answered(self, peer_id: int, answer: _Answer) -> list[Event]:
        asked, notify = self._reads.get(answer.ticket, (None, None))
        if asked != peer_id:
            self.refused += 1
            return []
        del self._reads[answer.ticket]
        if answer.error:
            return [Completion(answer.ticket, TransferFailedError(answer.error))]
        if notify is not None:
            try:
                super().post(answer.ticket, Op.WRITE, peer_id, EMPTY, _USER + notify)
            except KVTransportError as error:
                return [Completion(answer.ticket, error)]
            return []
        return [Completion(answer.ticket)]

    def _flush(self) -> None:
        """Send refusals; what cannot be sent now is tried again at the next poll."""
        answers, self._answers = self._answers, []
        for peer_id, answer in answers:
            try:
                self._send(peer_id, EMPTY, _ANSWER + _encode(answer), None)
            except KVTransportError as error:
                if error.retryable:
                    self._answers.append((peer_id, answer))
