"""Limits of an agent that do not depend on the backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransport.errors import ConfigError
from kvtransport.waiting import check_duration


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Limits of an agent; durations are seconds.

    ``deadline_s`` is a transfer's deadline unless the call gives one, ``drain_s``
    the time that a late, cancelled or failed transfer gets to become quiet
    before its memory is quarantined.  ``max_events`` and ``max_notifications``
    bound what nobody has read yet.
    """

    deadline_s: float = 30.0
    drain_s: float = 10.0
    max_events: int = 16_384
    max_notifications: int = 1 << 20

    def __post_init__(self) -> None:
        check_duration(self.deadline_s, "deadline_s")
        check_duration(self.drain_s, "drain_s")
        for name in ("max_events", "max_notifications"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
