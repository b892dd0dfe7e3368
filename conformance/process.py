"""What worker and peer processes have in common: stations, logs, resources, signals."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtransport.errors import KVTransportError
from kvtransport_conformance import listeners, resources
from kvtransport_conformance.loading import Loaded, facts, load
from kvtransport_conformance.station import Station

_MAX_LOGS = 200


class LogTrap(logging.Handler):
    """Keeps warnings and errors of the library, so that checks can ask for silence."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < _MAX_LOGS:
            self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


class Process:
    """State of one test process; ``dispatch`` runs a named operation."""

    def __init__(self) -> None:
        self.role = ""
        self.loaded: Loaded | None = None
        self.stations: dict[str, Station] = {}
        self.trap = LogTrap()
        self.everything: list[str] | None = None
        self.complaints: list[str] = []
        self._baseline = resources.Snapshot()
        self._counters: Counter[str] = Counter()
        logging.captureWarnings(capture=True)
        root = logging.getLogger()
        root.addHandler(self.trap)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    # Life ------------------------------------------------------------------------

    def init(self, target: Mapping[str, Any], role: str) -> dict[str, Any]:
        """Load the target; return facts about backend and process.

        ``role`` becomes part of every agent's name here: "worker", or a peer's name.
        """
        self.role = role
        peer = role != "worker"
        self.loaded = load(target, peer=peer)
        return facts(self.loaded) | {"process": self.identity()}

    def identity(self) -> dict[str, Any]:
        """Where this process runs, as evidence of what the two sides share."""
        return {
            "pid": os.getpid(),
            "pid_namespace": _link("/proc/self/ns/pid"),
            "net_namespace": _link("/proc/self/ns/net"),
            "boot_id": _read("/proc/sys/kernel/random/boot_id"),
            "host": socket.gethostname(),
            "preload": os.environ.get("LD_PRELOAD", ""),
            "os": f"{os.uname().sysname} {os.uname().release}",
            "cpus": os.cpu_count(),
            "modules": sorted(_names("/sys/module")),
            "nics": sorted(_names("/sys/class/infiniband")),
        }

    def warm_up(self) -> None:
        """Open and close an agent once: drivers create things that live for ever."""
        station = self.station("warm-up")
        station.open()
        station.reset()
        del self.stations["warm-up"]

    def baseline(self) -> None:
        """Remember what this process holds now."""
        self.trap.lines.clear()
        self._counters.clear()
        self._baseline = resources.snapshot()

    def station(self, name: str = "main") -> Station:
        assert self.loaded is not None
        if name not in self.stations:
            self.stations[name] = Station(f"{self.role}-{name}", self.loaded)
        return self.stations[name]

    def grade(self, drain_s: float = 5.0) -> dict[str, Any]:
        """Close everything; say what stayed behind and what was counted."""
        moved = 0
        complaints, self.complaints = self.complaints, []
        for station in self.stations.values():
            with contextlib.suppress(KVTransportError):
                self._counters.update(station.counters())
            moved += station.moved_bytes()
            complaints.append(station.reset(drain_s))
        self.stations.clear()
        found = {
            "residue": resources.settled_residue(self._baseline),
            "complaints": [text for text in complaints if text],
            "counters": dict(self._counters),
            "moved": moved,
        }
        self.trap.lines.clear()
        self._counters.clear()
        return found

    def pump(self) -> None:
        """Progress every agent once; what that raises is kept for ``grade``."""
        for station in list(self.stations.values()):
            try:
                station.pump()
            except KVTransportError as error:
                station.polling = False
                self.complaints.append(f"poll raised {type(error).__name__}: {error}")

    # Operations of the process itself ----------------------------------------------

    def listeners(self) -> list[list[Any]]:
        """Sockets this process listens on: [family, address, port or 0]."""
        return listeners.listening()

    def attack(self, family: str, address: str, port: int, seed: int) -> int:
        """Bother a listener with garbage; return how many connections it took."""
        return listeners.attack(family, address, port, seed)

    def logs(self) -> list[str]:
        return list(self.trap.lines)

    def log_everything(self) -> None:
        """Record every log line of this process from now on, debug included."""
        self.everything = []
        handler = logging.Handler(logging.NOTSET)
        lines = self.everything
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger("kvtransport").setLevel(logging.DEBUG)

    def all_logs(self) -> str:
        return "\n".join(self.everything or [])

    def resident(self) -> int:
        return resources.resident_bytes()

    def snapshot(self) -> dict[str, int] | None:
        """Device bytes and driver objects, if the target can count them."""
        assert self.loaded is not None
        found = self.loaded.target.snapshot()
        return None if found is None else dict(found)

    def held(self) -> list[str]:
        """What this process holds beyond its baseline right now."""
        return resources.snapshot().residue(self._baseline)

    def inject(self, fault: str) -> bool | None:
        assert self.loaded is not None
        return self.loaded.target.inject(fault)

    def garbage(self) -> None:
        """Print to descriptor 1, as a careless backend would."""
        sys.stdout.write("{not json\n")
        sys.stdout.flush()

    def dispatch(self, op: str, agent: str | None, args: Mapping[str, Any]) -> Any:
        """Run ``op`` of this process, or of one of its stations.

        Raises whatever the operation raises; ``AttributeError`` for unknown ones.
        """
        owner: Any = self if agent is None else self.station(agent)
        if op.startswith("_"):
            raise AttributeError(f"no operation {op!r}")
        return getattr(owner, op)(**args)


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return [entry.name for entry in Path(path).iterdir()]
    except OSError:
        return []
