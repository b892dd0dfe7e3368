"""The two faces of a station: in this process, or in a peer behind the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtransport_conformance.hub import CONTROLLER, Hub, Pending
from kvtransport_conformance.process import Process
from kvtransport_conformance.station import Station


class Side:
    """A station wherever it is: ``side.alloc(...)`` runs ``Station.alloc`` there.

    Bytes, numbers, strings, lists and dictionaries pass unchanged; errors of the
    library arrive as the same class.
    """

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name = name
        self._call = call

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._call(op, _named(op, args) | kwargs)

        return run


class LocalSide(Side):
    """A station of the worker itself; ``station`` gives direct access."""

    def __init__(self, name: str, process: Process) -> None:
        self._process = process
        super().__init__(name, lambda op, args: getattr(self.station, op)(**args))

    @property
    def station(self) -> Station:
        return self._process.station(self.name)


class RemoteSide(Side):
    """A station of a peer process."""

    def __init__(self, name: str, hub: Hub, process: str) -> None:
        super().__init__(name, lambda op, args: hub.call(process, op, name, args))
        self._hub = hub
        self.process = process

    def start(self, op: str, *args: Any, **kwargs: Any) -> Pending:
        """Start an operation and return at once."""
        named = _named(op, args) | kwargs
        return Pending(self._hub, self._hub.send(self.process, op, self.name, named))


class RemoteProcess:
    """A peer process as a whole: its own operations, and signals to it."""

    def __init__(self, name: str, hub: Hub) -> None:
        self.name = name
        self._hub = hub

    def call(self, op: str, **args: Any) -> Any:
        return self._hub.call(self.name, op, None, args)

    def side(self, name: str = "main") -> RemoteSide:
        return RemoteSide(name, self._hub, self.name)

    def signal(self, name: str) -> None:
        """Send "KILL", "STOP" or "CONT" from outside; returns once it took effect."""
        self._hub.call(CONTROLLER, "signal", None, {"process": self.name, "name": name})

    def kill(self) -> None:
        self.signal("KILL")

    def freeze(self) -> None:
        self.signal("STOP")

    def thaw(self) -> None:
        self.signal("CONT")

    def leave(self, patience_s: float) -> dict[str, Any]:
        """Let it end without closing anything; return exit code and seconds."""
        found: dict[str, Any] = self._hub.call(
            CONTROLLER, "leave", None, {"process": self.name, "patience_s": patience_s}
        )
        return found


def _named(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Name positional arguments as the station's method does."""
    names = getattr(Station, op).__code__.co_varnames[1 : 1 + len(args)]
    return dict(zip(names, args, strict=True))
