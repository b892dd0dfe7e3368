"""The system calls that Python's library does not offer, through ctypes.

Every call raises ``OSError`` on failure and releases the interpreter lock, except
where it is said not to: taking the lock back can cost milliseconds while another
thread computes in Python, and a copy of some kilobytes takes microseconds.  Bad
addresses are the kernel's to find: they give ``EFAULT``, never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from typing import Any

IOV_MAX = 1024
"""Most scatter entries that Linux takes in one call."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MSG_DONTWAIT = 0x40
_MSG_NOSIGNAL = 0x4000


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("vectors", ctypes.c_void_p),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


@functools.cache
def _libc(*, hold_lock: bool = False) -> Any:
    """Bind lazily: importing this module must work on every platform."""
    libc = (ctypes.PyDLL if hold_lock else ctypes.CDLL)(None, use_errno=True)
    address, count = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.argtypes = (ctypes.c_int, address, count, address, count, count)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    for call in (libc.sendmsg, libc.recvmsg):
        call.argtypes = (ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int)
        call.restype = ctypes.c_ssize_t
    return libc


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def is_linux() -> bool:
    return sys.platform.startswith("linux")


def process_vm_readv(pid: int, local: int, remote: int, count: int, *, small: bool = False) -> int:
    """Copy from ``pid``'s memory into ours; may stop early at a bad address.

    ``local`` and ``remote`` point to ``count`` iovecs; returns bytes copied.  A
    ``small`` copy keeps the interpreter lock.
    """
    libc = _libc(hold_lock=small)
    return _checked(libc.process_vm_readv(pid, local, count, remote, count, 0))


def send_vectors(fd: int, vectors: int, count: int) -> int:
    """Send what the socket takes now; raises ``BlockingIOError`` when that is nothing."""
    return _transfer(_libc().sendmsg, fd, vectors, count)


def receive_vectors(fd: int, vectors: int, count: int) -> int:
    """Receive what the socket holds; 0 at its end, ``BlockingIOError`` when empty."""
    return _transfer(_libc().recvmsg, fd, vectors, count)


def _transfer(call: Any, fd: int, vectors: int, count: int) -> int:
    header = _MsgHdr(vectors=vectors, vector_count=count)
    while True:
        result: int = call(fd, ctypes.byref(header), _MSG_DONTWAIT | _MSG_NOSIGNAL)
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        raise OSError(code, os.strerror(code))


def allow_any_ptracer() -> None:
    """Let every process of this user read our memory, where Yama asks for it."""
    _checked(_libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0))
