"""Notifications: payloads on the wire and who sent them.

NIXL attributes a message to the sender's NIXL name and drops empty ones, so
each payload travels behind one marker byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvtransport.backend import Notification

_log = logging.getLogger("kvtransport.nixl")

MAX_PAYLOAD = 8 * 1024 - 256
"""NIXL carries notifications safely up to 8 KiB, its own header included."""

_MARK = b"\x01"
_MAX_UNKNOWN = 4096


class Inbox:
    """Turns NIXL's notifications into ours."""

    def __init__(self) -> None:
        self._unknown: list[tuple[str, bytes]] = []
        self.dropped = 0

    @property
    def waiting(self) -> bool:
        """Whether messages are kept whose sender was unknown."""
        return bool(self._unknown)

    @staticmethod
    def wrap(payload: bytes) -> bytes:
        return _MARK + payload

    def receive(
        self, messages: Mapping[str, Sequence[bytes]], peer_id_of: Callable[[str], int | None]
    ) -> list[Notification]:
        """Attribute new messages and the kept ones of agents that were imported since.

        A sender may be quicker than the control plane that introduces it, so
        messages of unknown agents are kept, up to a limit.
        """
        waiting = self._unknown
        waiting += [(name, message) for name, batch in messages.items() for message in batch]
        self._unknown = []
        found = []
        for name, message in waiting:
            if not message.startswith(_MARK):
                continue  # not sent by this library
            peer_id = peer_id_of(name)
            if peer_id is not None:
                found.append(Notification(peer_id, message[1:]))
            else:
                self._keep(name, message)
        return found

    def _keep(self, name: str, message: bytes) -> None:
        if len(self._unknown) < _MAX_UNKNOWN:
            self._unknown.append((name, message))
            return
        if not self.dropped:
            _log.warning(
                "notification dropped: its sender is not imported and %d are kept", _MAX_UNKNOWN
            )
        self.dropped += 1
