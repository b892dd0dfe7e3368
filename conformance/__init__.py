"""Conformance suite: shows what a backend of kvtransport really does.

Architecture
    The *controller* (``session``) holds the plan and writes the report; it never
    loads a backend.  A *worker* process runs the check functions; one or more
    *peer* processes hold the other side.  All of them speak JSON lines over
    descriptors that the backend cannot reach by printing.

Oracle
    Test memory is filled and compared by a memory kit inside the process that
    owns it, never through the transport under test.

For vendors
    A host-memory backend needs nothing but its entry point.  A device backend
    adds a ``MemoryKit`` and a ``Target``; see ``docs/writing-a-backend.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransport_conformance.target import HostMemory, MemoryKit, SimulatedMemory, Target

SUITE_VERSION = "2026.1"
"""Calendar version of the checks' meaning; a report is bound to it."""

__all__ = ["SUITE_VERSION", "HostMemory", "MemoryKit", "SimulatedMemory", "Target"]


def __getattr__(name: str) -> object:
    # Lazy, because pytest imports this package wherever it is installed.
    if name in __all__:
        from kvtransport_conformance import target

        return getattr(target, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
