"""Saboteurs that move the wrong bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks, Completion, Event, Op, RegionSpec
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur

MIB = 1 << 20


def resized(blocks: Blocks, nbytes: NDArray[Any]) -> Blocks:
    """The same descriptors with other lengths; empty ones are left out."""
    sizes = nbytes.astype(np.uint64)
    keep = sizes > 0
    return Blocks(
        blocks.local_region[keep],
        blocks.local_offset[keep],
        blocks.remote_region[keep],
        blocks.remote_offset[keep],
        sizes[keep],
    )


class Rewrites(BrokenBackend):
    """Base of saboteurs that change descriptors before they are posted."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        raise NotImplementedError

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if len(blocks):
            blocks = self.rewrite(blocks)
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("DSC-04", "INT-05", "RD-01", "WR-01")
class DropsTail(Rewrites):
    """Leaves out the last byte of every descriptor of 8,193 bytes, as a bad MTU split would."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        return resized(blocks, blocks.nbytes - (blocks.nbytes == 8193))


@saboteur("CAN-04", "CMP-09", "ORD-02", "RD-01", "RD-05", "WR-01", "WR-05")
class DropsLastPage(Rewrites):
    """Leaves out the last page of single descriptors of exactly 1 MiB."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        if len(blocks) == 1 and blocks.nbytes[0] == MIB:
            return resized(blocks, blocks.nbytes - 4096)
        return blocks


@saboteur("CON-08", "DSC-04", "INT-01", "RD-01", "RD-02", "WR-01", "WR-02")
class Overruns(Rewrites):
    """Rounds descriptors of 7 bytes up to 8."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        return resized(blocks, blocks.nbytes + (blocks.nbytes == 7))


@saboteur("CON-08", "DSC-03", "DSC-04", "DSC-05", "ORD-05", "RD-02", "WR-02")
class FillsGaps(Rewrites):
    """Moves the gap as well when two blocks lie close to each other on both sides."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        if len(blocks) < 2:
            return blocks
        here, there = np.diff(blocks.local_offset), np.diff(blocks.remote_offset)
        close = (here == there) & (here > blocks.nbytes[:-1]) & (here <= 4096)
        sizes = blocks.nbytes.copy()
        sizes[:-1][close] = here[close]
        return resized(blocks, sizes)


@saboteur("CON-08", "DSC-04", "INT-05")
class UniformLengths(Rewrites):
    """Takes the first descriptor's length for that of all when it is 1."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        if len(blocks) > 1 and blocks.nbytes[0] == 1:
            return resized(blocks, np.ones(len(blocks)))
        return blocks


@saboteur("DSC-01")
class IgnoresOffsets(Rewrites):
    """Reads and writes single descriptors of 10,000 bytes at the beginning of the region."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        if len(blocks) == 1 and blocks.nbytes[0] == 10_000:
            return replace(blocks, local_offset=np.zeros(1, np.uint64))
        return blocks


@saboteur("DSC-02", "DSC-03", "DSC-05", "INT-02", "ORD-01")
class SwapsTwoBlocks(Rewrites):
    """Exchanges the targets of the last two of at least 60 blocks."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        if len(blocks) < 60 or blocks.nbytes[-1] != blocks.nbytes[-2]:
            return blocks
        offsets = blocks.remote_offset.copy()
        offsets[-2:] = offsets[-2:][::-1]
        return replace(blocks, remote_offset=offsets)


@saboteur("REG-12")
class Offsets32(Rewrites):
    """Cuts offsets to 32 bits."""

    def rewrite(self, blocks: Blocks) -> Blocks:
        mask = np.uint64((1 << 32) - 1)
        return replace(
            blocks,
            local_offset=blocks.local_offset & mask,
            remote_offset=blocks.remote_offset & mask,
        )


@saboteur("CON-03", "CON-08", "INT-05", "MD-01", "MD-13", "REG-12")
class WrongWayRound(Rewrites):
    """Loses the last byte of what the peer process initiates."""

    def open(self, name: str, config: object) -> None:
        self._peer_side = name.startswith("peer")
        self.inner.open(name, config)

    def rewrite(self, blocks: Blocks) -> Blocks:
        if not self._peer_side:
            return blocks
        sizes = blocks.nbytes.copy()
        sizes[-1] -= 1
        return resized(blocks, sizes)


@saboteur("INT-01", "INT-05", "NTF-02")
class ForgetsOneInThousand(Rewrites):
    """Leaves out one byte in every thousandth transfer."""

    def __init__(self) -> None:
        super().__init__()
        self._count = count(1)

    def rewrite(self, blocks: Blocks) -> Blocks:
        if next(self._count) % 1000 or blocks.nbytes[0] < 2:
            return blocks
        sizes = blocks.nbytes.copy()
        sizes[0] -= 1
        return resized(blocks, sizes)


@saboteur("REG-05")
class AlignsBases(BrokenBackend):
    """Rounds the base address of regions down to 8 bytes."""

    def register(self, region: RegionSpec) -> None:
        self.inner.register(replace(region, address=region.address // 8 * 8))


@saboteur("REG-03")
class MixesOverlaps(BrokenBackend):
    """Confuses the places of regions that lie inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self._known: list[RegionSpec] = []

    def register(self, region: RegionSpec) -> None:
        for other in self._known:
            inside = other.address <= region.address < other.address + other.nbytes
            if inside and region.nbytes < other.nbytes:
                region = replace(region, address=region.address + 64, nbytes=region.nbytes)
        self._known.append(region)
        self.inner.register(region)


@saboteur("ORD-04", "RD-04")
class CachesReads(BrokenBackend):
    """Answers a read of 64 KiB that was made before from memory."""

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[int, RegionSpec] = {}
        self._cache: dict[tuple[int, ...], bytes] = {}
        self._open: dict[int, tuple[tuple[int, ...], int]] = {}
        self._instant: list[Event] = []

    def register(self, region: RegionSpec) -> None:
        self._specs[region.region_id] = region
        self.inner.register(region)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if op is Op.READ and len(blocks) == 1 and blocks.nbytes[0] == 1 << 16:
            key = (peer_id, int(blocks.remote_region[0]), int(blocks.remote_offset[0]))
            spec = self._specs[int(blocks.local_region[0])]
            address = spec.address + int(blocks.local_offset[0])
            if key in self._cache:
                ctypes.memmove(address, self._cache[key], 1 << 16)
                self._instant.append(Completion(ticket))
                return
            self._open[ticket] = (key, address)
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        found = [*self.inner.poll(), *self._instant]
        self._instant = []
        for event in found:
            if isinstance(event, Completion) and event.ticket in self._open:
                key, address = self._open.pop(event.ticket)
                self._cache[key] = ctypes.string_at(address, 1 << 16)
        return found


@saboteur("ORD-02", "WR-03")
class ScribblesSource(BrokenBackend):
    """Leaves a byte in the source of writes of 1 MiB, as a compressing transport might."""

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[int, RegionSpec] = {}
        self._open: dict[int, int] = {}

    def register(self, region: RegionSpec) -> None:
        self._specs[region.region_id] = region
        self.inner.register(region)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if op is Op.WRITE and len(blocks) == 1 and blocks.nbytes[0] == MIB:
            spec = self._specs[int(blocks.local_region[0])]
            self._open[ticket] = spec.address + int(blocks.local_offset[0])
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        found = self.inner.poll()
        for event in found:
            if isinstance(event, Completion) and event.ticket in self._open:
                ctypes.memset(self._open.pop(event.ticket), 0x55, 1)
        return found


@saboteur("RD-03")
class ReadsDirty(BrokenBackend):
    """Leaves a byte in the peer's memory before it reads 1 MiB of it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Event] = []

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if op is Op.READ and len(blocks) == 1 and blocks.nbytes[0] == MIB:
            one = replace(blocks, nbytes=np.ones(1, np.uint64))
            mark = self.extra_post(Op.WRITE, peer_id, one)
            # The read must not come first: the byte would be the peer's own then.
            while not any(getattr(event, "ticket", 0) == mark for event in self._kept):
                self._kept += self.inner.poll()
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        kept, self._kept = self._kept, []
        return [
            event
            for event in (*kept, *self.inner.poll())
            if not (isinstance(event, Completion) and event.ticket > self.PRIVATE)
        ]


@saboteur("INT-03")
class QuietsNaNs(BrokenBackend):
    """Interprets the data as floating point numbers: signalling NaNs become quiet ones."""

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[int, RegionSpec] = {}

    def register(self, region: RegionSpec) -> None:
        self._specs[region.region_id] = region
        self.inner.register(region)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        if op is Op.WRITE and len(blocks) == 1 and blocks.nbytes[0] == 8 * MIB:
            spec = self._specs[int(blocks.local_region[0])]
            raw = (ctypes.c_uint64 * (spec.nbytes // 8)).from_address(spec.address)
            words = np.frombuffer(memoryview(raw).cast("B"), np.uint64)
            nan = (words >> np.uint64(52)) == 0x7FF
            words[nan] |= np.uint64(1 << 51)
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("ORD-02")
class SkipsRepeatedWrites(BrokenBackend):
    """Takes a second write of 1 MiB to the same place for a repetition and skips it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[int, ...] = ()
        self._instant: list[Event] = []

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        key: tuple[int, ...] = ()
        if op is Op.WRITE and len(blocks) == 1 and blocks.nbytes[0] == MIB:
            key = (peer_id, int(blocks.remote_region[0]), int(blocks.remote_offset[0]))
        if key and key == self._last:
            self._instant.append(Completion(ticket))
            return
        self._last = key
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def poll(self) -> Sequence[Event]:
        found = [*self.inner.poll(), *self._instant]
        self._instant = []
        return found
