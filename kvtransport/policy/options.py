"""Policies from their configured names, and checks of their options."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from kvtransport.errors import ConfigError

T = TypeVar("T")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word, or the list of what exists."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ``ConfigError`` unless ``low <= value <= high``."""
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, not {value!r}")


def load_named(
    what: str,
    name: str,
    own: Mapping[str, Callable[[Mapping[str, object]], T]],
    group: str,
    kind: Any,
    config: Mapping[str, object],
) -> T:
    """Make the policy called ``name`` from ``own`` or from entry-point group ``group``."""
    if name in own:
        return own[name](config)
    others = {point.name: point for point in entry_points(group=group)}
    if name not in others:
        raise ConfigError(f"{what}: unknown policy {name!r}{nearest(name, [*own, *others])}")
    make: Any = others[name].load()
    made = make(config)
    if not isinstance(made, kind):
        source = others[name].value
        raise ConfigError(f"{what}: {source} made a {type(made).__name__}, not a {kind.__name__}")
    policy: T = made
    return policy
