"""What an agent tells its user, and the queue that holds it.

Ends of transfers and lost peers come from ``Agent.poll``; messages come from
``Agent.notifications``.  Each is delivered once, by that one method.  Waiting
for one transfer never takes another's event away: every backend event goes
through the agent's queue first, whoever polled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from kvtransport.errors import KVTransportError
from kvtransport.peer import Peer
from kvtransport.transfer import Transfer


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """``transfer`` became terminal; its state and error say how."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class PeerLostEvent:
    """``peer`` is gone; its transfers end with events of their own."""

    peer: Peer
    error: KVTransportError


@dataclass(frozen=True, slots=True)
class NotificationEvent:
    """``peer`` sent ``payload``; the data of its transfer is visible here."""

    peer: Peer
    payload: bytes


Event: TypeAlias = TransferEvent | PeerLostEvent


class EventQueue:
    """Bounded queues: an agent whose user never polls does not grow for ever.

    Losing an event of ``poll`` loses no state (``Transfer.state`` and
    ``Peer.state`` hold it), so the oldest go first.  Losing a message would, so
    that bound is generous; both losses are counted.
    """

    def __init__(self, max_events: int, max_notifications: int) -> None:
        self._events: deque[Event] = deque()
        self._notifications: deque[NotificationEvent] = deque()
        self._max_events = max_events
        self._max_notifications = max_notifications
        self.dropped_events = 0
        self.dropped_notifications = 0

    def put(self, event: Event) -> None:
        if len(self._events) >= self._max_events:
            self._events.popleft()
            self.dropped_events += 1
        self._events.append(event)

    def put_notification(self, event: NotificationEvent) -> bool:
        """Keep a message; False when it had to be dropped."""
        if len(self._notifications) >= self._max_notifications:
            self.dropped_notifications += 1
            return False
        self._notifications.append(event)
        return True

    def take(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    def take_notifications(self) -> list[NotificationEvent]:
        events = list(self._notifications)
        self._notifications.clear()
        return events
