"""Things that must outlive their owner because hardware may still touch them."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_kept: list[object] = []


def keep_for_ever(*things: object) -> None:
    """Keep objects alive until the process ends; quarantined memory lands here."""
    with _lock:
        _kept.extend(things)


def kept_count() -> int:
    """How many objects are kept."""
    return len(_kept)
