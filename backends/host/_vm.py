"""Reading another process's memory, and knowing that it was the right one.

The kernel lets us read *any* address of a process of our user, so every
address comes from a bounds-checked table and every copy is enclosed by two
looks at the peer's guard words (``_guard.py``).  What the second look does not
confirm is discarded: the owner cannot stop a copy under way, but no byte of it
is ever counted.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import (
    KVTransportError,
    PeerLostError,
    StaleDescriptorError,
    TransferFailedError,
)
from kvtransport_backends.host import _sys
from kvtransport_backends.host._guard import HEADER_WORDS
from kvtransport_backends.host._plan import Plan
from kvtransport_backends.host._vectors import IOVEC_BYTES, Vectors

Words = NDArray[np.int64]
_SMALL_BYTES = 128 * 1024
_UNLIMITED: AbstractContextManager[None] = nullcontext()


class VmRefusedError(Exception):
    """The memory cannot be read from here; the text says why and what to do.

    ``gone`` means that the peer is not there any more, ``same_machine`` that it
    is and could be read if the kernel allowed it.
    """

    def __init__(self, reason: str, *, gone: bool = False, same_machine: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone
        self.same_machine = same_machine


class VmMemory:
    """One peer process's memory.  Methods may be called from any thread.

    Raises ``VmRefusedError`` unless the process's memory shows ``nonce`` at
    ``guard_address``.  Holds one file descriptor until ``close``.
    """

    def __init__(self, pid: int, guard_address: int, nonce: bytes) -> None:
        self.pid = pid
        self._guard_address = guard_address
        self._nonce = nonce
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise VmRefusedError(
                f"process {pid} cannot be watched: {error.strerror}",
                gone=error.errno == errno.ESRCH,
            ) from error
        try:
            self._prove()
        except BaseException:
            self.close()
            raise

    def _prove(self) -> None:
        try:
            seen = self._guard(0)
        except OSError as error:
            gone = error.errno in {errno.ESRCH, errno.EFAULT}
            raise VmRefusedError(
                _refusal(self.pid, error), gone=gone, same_machine=not gone
            ) from error
        if seen is None:
            raise VmRefusedError(
                f"process {self.pid} is not this peer, or closed it: its nonce differs", gone=True
            )

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def alive(self) -> bool:
        """Whether the process still runs; a dead one never comes back."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return not poller.poll(0)

    def check(self, slots: NDArray[np.intp], expected: Words) -> None:
        """Raise unless the peer is open and its ``slots`` hold ``expected``.

        Raises ``PeerLostError`` (closed, dead, replaced) or
        ``StaleDescriptorError`` (a region was withdrawn).
        """
        try:
            words = self._guard(int(slots.max(initial=-1)) + 1)
        except OSError as error:
            raise PeerLostError(
                f"process {self.pid} died or closed its agent", backend="host", native=error
            ) from error
        if words is None:
            raise PeerLostError(f"process {self.pid} closed its agent", backend="host")
        if (words[slots] != expected).any():
            raise StaleDescriptorError(
                "a remote region was deregistered; import the peer's new metadata", backend="host"
            )

    def _guard(self, slots: int) -> Words | None:
        """The first ``slots`` words, or None when the nonce is not there."""
        words = np.empty(HEADER_WORDS + slots, np.int64)
        size = words.nbytes
        rows = np.array([words.ctypes.data, size, self._guard_address, size], np.uint64)
        at = rows.ctypes.data
        moved = _sys.process_vm_readv(self.pid, at, at + IOVEC_BYTES, 1, small=True)
        if moved != size or words[:HEADER_WORDS].tobytes() != self._nonce:
            return None
        return words[HEADER_WORDS:]

    def read(
        self,
        plan: Plan,
        chunk_bytes: int,
        copy_slots: AbstractContextManager[object] = _UNLIMITED,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry out a READ, holding one of ``copy_slots`` during each chunk.

        Raises what ``check`` raises, ``TransferFailedError``, and whatever
        ``between``, called before each chunk, raises.  The destination's content
        is undefined then, and nothing moves any more.
        """
        local = Vectors(plan.local, plan.nbytes)
        remote = Vectors(plan.remote, plan.nbytes)
        self.check(plan.slots, plan.words)
        try:
            while local.remaining:
                between()
                with copy_slots:
                    self.step(local, remote, chunk_bytes)
        except OSError as error:
            self.check(plan.slots, plan.words)  # a withdrawn region explains it better
            raise self._translate(error) from error
        self.check(plan.slots, plan.words)

    def step(self, local: Vectors, remote: Vectors, max_bytes: int) -> None:
        """Copy about ``max_bytes`` (less at a page that is not mapped) and advance both.

        Both must have equal row lengths.  Raises ``OSError``: ``EFAULT`` when an
        address on either side is not mapped, ``ESRCH`` when the process is gone.
        """
        pointer, count = local.window(max_bytes)
        moved = _sys.process_vm_readv(
            self.pid,
            pointer,
            remote.window(max_bytes)[0],
            count,
            small=local.remaining <= _SMALL_BYTES,
        )
        if moved == 0:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        local.advance(moved)
        remote.advance(moved)

    def _translate(self, error: OSError) -> KVTransportError:
        """The library's error for what ``step`` raised."""
        if error.errno == errno.ESRCH or not self.alive():
            return PeerLostError(f"process {self.pid} died", backend="host", native=error)
        return TransferFailedError(
            f"reading process {self.pid} failed: {error.strerror}", backend="host", native=error
        )


def _refusal(pid: int, error: OSError) -> str:
    if error.errno == errno.EPERM:
        return (
            f"the kernel refuses to read process {pid}: it runs as another user or in another "
            "user namespace, a seccomp profile forbids process_vm_readv, or Yama's ptrace_scope "
            "is 1 and the peer lacks the option allow_ptracer"
        )
    if error.errno == errno.ENOSYS:
        return "this kernel or sandbox has no process_vm_readv"
    if error.errno == errno.EFAULT:
        return f"process {pid} is not this peer: it has no memory where the nonce should be"
    return f"reading process {pid} failed: {error.strerror}"
