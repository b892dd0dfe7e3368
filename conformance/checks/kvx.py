"""KVX: the vLLM adapter; these need engines, and are shown by the adapter's own tests.

They are part of the catalogue so that a report can say what was not verified;
they belong to no default plan.
"""

from __future__ import annotations

from kvtransport_conformance.context import Context, NotVerified
from kvtransport_conformance.registry import check

_VLLM = ["KVT-VLLM"]
_WHERE = "needs two vLLM engines: run the project's tests/adapter and tests/engines instead"


@check(
    "KVX-01", level="core", profiles=_VLLM, first_release=True,
    why="smg#1622: nothing was ever transferred and output tests stayed green",
)  # fmt: skip
def bytes_really_moved(_: Context) -> None:
    """Bytes pulled are more than zero and equal to the plan."""
    raise NotVerified(_WHERE)


@check("KVX-02", level="core", profiles=_VLLM, first_release=True)
def failure_is_closed(_: Context) -> None:
    """A failed load means recompute or error, never tokens from it."""
    raise NotVerified(_WHERE)


@check("KVX-03", level="core", profiles=_VLLM)
def unequal_tp_property(_: Context) -> None:
    """Unequal tensor parallelism moves every head to its place, or is refused."""
    raise NotVerified(_WHERE)


@check("KVX-04", level="core", profiles=_VLLM)
def no_park_for_ever(_: Context) -> None:
    """No request waits for KV without a deadline."""
    raise NotVerified(_WHERE)


@check("KVX-05", level="core", profiles=_VLLM)
def kv_content_identity(_: Context) -> None:
    """Reuse follows content: an edited history never reads the old answer's KV."""
    raise NotVerified(_WHERE)
