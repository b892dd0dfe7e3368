"""Test memory of one process: buffers of a kit, filled and compared outside the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtransport_conformance import patterns
from kvtransport_conformance.target import HostMemory, MemoryKit, SimulatedMemory


@dataclass(slots=True)
class Memory:
    """One buffer; ``skip`` bytes at its beginning are not part of what is registered."""

    kit: MemoryKit
    buffer: Any
    nbytes: int
    skip: int = 0

    @property
    def _plain(self) -> bool:
        """Whether slices of the buffer may stand for the kit's own operations."""
        return type(self.kit) in {HostMemory, SimulatedMemory}

    def registrable(self) -> Any:
        """What ``Agent.register`` gets: the buffer, or a slice of it."""
        if not self.skip:
            return self.buffer
        if self._plain:
            return self.buffer[self.skip :]
        return (self.address() + self.skip, self.nbytes, self.buffer)

    def address(self) -> int:
        if hasattr(self.buffer, "data_ptr"):
            return int(self.buffer.data_ptr())
        return int(np.frombuffer(memoryview(self.buffer), np.uint8).ctypes.data)

    def fill(self, wire: Sequence[Any]) -> None:
        """Fill with a pattern's bytes from position 0 on."""
        data = patterns.pattern(wire).data(0, self.nbytes)
        self.write(0, data.tobytes())

    def write(self, offset: int, data: bytes) -> None:
        """Write ``data`` at ``offset``; on devices the whole buffer goes through the kit."""
        start = self.skip + offset
        if self._plain:
            self.kit.fill(self.buffer[start:], data)
            return
        whole = bytearray(self.kit.dump(self.buffer))
        whole[start : start + len(data)] = data
        self.kit.fill(self.buffer, bytes(whole))

    def dump(self) -> patterns.Bytes:
        if self._plain:
            return np.array(self.buffer[self.skip : self.skip + self.nbytes])
        whole = np.frombuffer(self.kit.dump(self.buffer), np.uint8)
        return whole[self.skip : self.skip + self.nbytes]

    def peek(self, offset: int, nbytes: int) -> bytes:
        if self._plain:
            start = self.skip + offset
            return bytes(memoryview(self.buffer)[start : start + nbytes])
        return self.dump()[offset : offset + nbytes].tobytes()

    def mismatch(self, wire: Sequence[Any]) -> str:
        """Return "" or what differs from the expected contents."""
        return patterns.mismatch(self.dump(), patterns.expected(wire))


def allocate(kit: MemoryKit, nbytes: int, skip: int) -> Memory:
    """Allocate a buffer whose first ``skip`` bytes are not part of the memory."""
    return Memory(kit, kit.alloc(nbytes + skip), nbytes, skip)
