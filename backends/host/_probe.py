"""Whether memory of another process can be read here, and if not, why."""

from __future__ import annotations

import os

from kvtransport.backend import Probe
from kvtransport_backends.host import _sys
from kvtransport_backends.host._body import AGENT_ID_BYTES
from kvtransport_backends.host._guard import Guard
from kvtransport_backends.host._identity import yama_scope
from kvtransport_backends.host._vm import VmMemory, VmRefusedError
from kvtransport_backends.host.config import HostConfig


def probe(config: HostConfig) -> Probe:
    """Try the system call on this process itself; opens nothing that stays."""
    if not _sys.is_linux():
        return Probe(
            available=False,
            reason="the host backend needs Linux",
            hint="run it on Linux, in a container or a virtual machine",
        )
    refusal = own_memory_refusal()
    details = {
        "path": config.path,
        "vm": refusal or _yama_note(config) or "usable",
        "tcp": "off" if config.path == "vm" else config.advertise or config.listen,
    }
    if refusal and config.path == "vm":
        return Probe(
            available=False, reason=refusal, hint='set path to "auto" or "tcp"', details=details
        )
    return Probe(available=True, details=details)


def own_memory_refusal() -> str:
    """Why this process cannot even read itself; empty when it can."""
    nonce = os.urandom(AGENT_ID_BYTES)
    guard = Guard(nonce, 0)
    try:
        VmMemory(os.getpid(), guard.address, nonce).close()
    except VmRefusedError as error:
        return str(error)
    return ""


def _yama_note(config: HostConfig) -> str:
    scope = yama_scope()
    if scope == 0 or (scope == 1 and config.allow_ptracer):
        return ""
    if scope == 1:
        return "peers are refused by Yama (ptrace_scope 1) unless allow_ptracer is set"
    return f"peers are refused by Yama (ptrace_scope {scope})"
