"""The worker's line to the controller, which starts, signals and relays to peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from kvtransport_conformance.wire import Channel
from kvtransport_conformance.wire_errors import revive

CONTROLLER = "controller"
_PUMP_S = 0.001


class PeerGoneError(Exception):
    """A peer process died before it answered."""


class Hub:
    """Requests to other processes; ``pump`` keeps the worker's own agents moving.

    One thread at a time.
    """

    def __init__(self, channel: Channel, pump: Callable[[], None]) -> None:
        self._channel = channel
        self._pump = pump
        self._ids = count(1)
        self._replies: dict[int, dict[str, Any]] = {}

    def send(self, to: str, op: str, agent: str | None, args: Mapping[str, Any]) -> int:
        """Send a request without waiting; ``result`` fetches its answer."""
        number = next(self._ids)
        self._channel.send({"to": to, "id": number, "op": op, "agent": agent, "args": {**args}})
        return number

    def result(self, number: int) -> Any:
        """Wait for an answer, without limit: the watchdog bounds every check.

        Raises the error that the operation raised, or ``PeerGoneError``.
        """
        while number not in self._replies:
            try:
                reply = self._channel.receive(_PUMP_S)
            except TimeoutError:
                self._pump()
                continue
            self._replies[reply["id"]] = reply
        reply = self._replies.pop(number)
        if "lost" in reply:
            raise PeerGoneError(reply["lost"])
        if "error" in reply:
            raise revive(reply["error"])
        return reply.get("ok")

    def call(self, to: str, op: str, agent: str | None, args: Mapping[str, Any]) -> Any:
        return self.result(self.send(to, op, agent, args))


class Pending:
    """An operation that runs in a peer while the check goes on."""

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub = hub
        self._number = number

    def result(self) -> Any:
        return self._hub.result(self._number)
