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


def _word(name: str, absent: str = "none") -> tuple[Callable[[Declared], Any], ...]:
    return (lambda caps: caps[name], lambda caps: caps[name] != absent)


def _member(name: str, item: str) -> tuple[Callable[[Declared], Any], ...]:
    return (lambda caps: item in caps[name], lambda caps: item in caps[name])


def _boolean(name: str) -> tuple[Callable[[Declared], Any], ...]:
    return (lambda caps: caps[name], lambda caps: bool(caps[name]))


FLAGS: tuple[Flag, ...] = (
    Flag("ops.read", *_member("ops", "read"), refusable=True),
    Flag("ops.write", *_member("ops", "write"), refusable=True),
    Flag("notify", *_word("notify"), refusable=True),
    Flag("notify_after_data", *_boolean("notify_after_data")),
    Flag("completion", *_word("completion", absent="local")),
    Flag("ordering", *_word("ordering")),
    Flag("cancel", *_word("cancel"), refusable=True),
    Flag("failure_detection", *_word("failure_detection")),
    Flag("threading", *_word("threading", absent="single")),
    Flag("progress", *_word("progress", absent="manual")),
    Flag("target_enforces", *_boolean("target_enforces")),
    Flag("target_enforces.bounds", *_member("target_enforces", "bounds")),
    Flag("target_enforces.access", *_member("target_enforces", "access")),
    Flag("target_enforces.stale_key", *_member("target_enforces", "stale_key")),
    Flag("dynamic_regions", *_boolean("dynamic_regions")),
    Flag("path_evidence", *_boolean("path_evidence")),
)

BY_KEY: Mapping[str, Flag] = {flag.key: flag for flag in FLAGS}


def supports(caps: Declared, key: str) -> bool:
    """Return whether ``caps`` make the promise ``key``; ``op`` means any operation."""
    if key == "op":
        return bool(caps["ops"])
    return BY_KEY[key].holds(caps)


def declared_json(capabilities: Capabilities) -> dict[str, Any]:
    """Turn a declaration into JSON with a stable order of set members."""
    return {
        entry.name: _plain(getattr(capabilities, entry.name)) for entry in fields(capabilities)
    }


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
