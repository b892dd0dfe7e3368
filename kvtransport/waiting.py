"""How the library waits: durations are checked, pauses are short and yield."""

from __future__ import annotations

import math
import select
import time

from kvtransport.errors import ConfigError

_SPINS = 2000
_LONGEST_PAUSE_S = 1e-3


def check_duration(value: float, name: str) -> float:
    """Return a positive finite number of seconds, or raise ``ConfigError``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number of seconds, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be a finite number of seconds >= 0, got {value!r}")
    return float(value)


class Pause:
    """Pauses between two polls: first only yielding, later up to a millisecond.

    The first pauses give up the interpreter lock without sleeping.  An empty
    ``poll(0)`` does that in under a microsecond; ``time.sleep(0)`` takes more
    than fifty on Linux, because it arms a timer.
    """

    __slots__ = ("_count", "_yield")

    def __init__(self) -> None:
        self._count = 0
        self._yield = select.poll().poll

    def __call__(self, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._count += 1
        if self._count <= _SPINS:
            self._yield(0)
        else:
            pause = min(20e-6 * (1 + (self._count - _SPINS) / 16), _LONGEST_PAUSE_S, longest_s)
            time.sleep(max(pause, 0.0))
