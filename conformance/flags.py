"""Capability flags as data: what a declaration promises and how to name it.

Reports and the controller see capabilities as plain JSON, because only worker
and peer processes ever load a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtransport.capabilities import Capabilities

Declared = Mapping[str, Any]
"""Capabilities as JSON: field names of ``Capabilities``, sets as sorted lists."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One promise: ``declared`` reads its value, ``holds`` says if it is made."""

    key: str
    declared: Callable[[Declared], Any]
    holds: Callable[[Declared], bool]
    refusable: bool = False
    """Whether use without the promise must be refused, so that absence is testable."""


def _word(key: str, *, absent: str = "none", refusable: bool = False) -> Flag:
    return Flag(key, lambda caps: caps[key], lambda caps: caps[key] != absent, refusable)


def _member(name: str, item: str, *, refusable: bool = False) -> Flag:
    def test(caps: Declared) -> bool:
        return item in caps[name]

    return Flag(f"{name}.{item}", test, test, refusable)


def _some(key: str) -> Flag:
    return Flag(key, lambda caps: caps[key], lambda caps: bool(caps[key]))


FLAGS: tuple[Flag, ...] = (
    _member("ops", "read", refusable=True),
    _member("ops", "write", refusable=True),
    _word("notify", refusable=True),
    _some("notify_after_data"),
    _word("completion", absent="local"),
    _word("ordering"),
    _word("cancel", refusable=True),
    _word("failure_detection"),
    _word("threading", absent="single"),
    _word("progress", absent="manual"),
    _some("target_enforces"),
    _member("target_enforces", "bounds"),
    _member("target_enforces", "access"),
    _member("target_enforces", "stale_key"),
    _some("dynamic_regions"),
    _some("path_evidence"),
)

BY_KEY: Mapping[str, Flag] = {flag.key: flag for flag in FLAGS}


def supports(caps: Declared, key: str) -> bool:
    """Return whether ``caps`` make the promise ``key``; ``op`` means any operation."""
    if key == "op":
        return bool(caps["ops"])
    return BY_KEY[key].holds(caps)


def declared_json(capabilities: Capabilities) -> dict[str, Any]:
    """Turn a declaration into JSON with a stable order of set members."""
    return {entry.name: _plain(getattr(capabilities, entry.name)) for entry in fields(capabilities)}


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
