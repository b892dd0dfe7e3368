"""Two network namespaces joined by a cable: the nearest thing to two hosts on one.

Needs root, ``ip`` and ``unshare``.  Each side also gets its own process, IPC and
host name spaces, so that no shortcut between processes of one host is left.

Packets are made to vanish by a wrong hardware address of the other end: that is
silent, works in one direction, and needs no kernel module, unlike netem.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvtransport.errors import ConfigError

_NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of the cable."""

    namespace: str
    device: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another one in here."""
        return (
            "ip", "netns", "exec", self.namespace,
            "unshare", "--pid", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child",
        )  # fmt: skip


class Namespaces:
    """A context manager that makes the namespaces and removes them again.

    Raises ``ConfigError`` when the rights or tools are missing.
    """

    def __init__(self) -> None:
        _require_tools()
        tag = os.getpid() % 60_000
        net = f"10.{200 + tag // 16_384}.{tag // 64 % 256}"
        last = tag % 64 * 4
        self.local = Side(f"kvt-a-{tag}", f"kvta{tag}", f"{net}.{last + 1}")
        self.peer = Side(f"kvt-b-{tag}", f"kvtb{tag}", f"{net}.{last + 2}")

    def __enter__(self) -> Self:
        try:
            self._make()
        except ConfigError:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        for side in (self.local, self.peer):
            _run("ip", "netns", "add", side.namespace)
        _run("ip", "link", "add", self.local.device, "type", "veth", "peer", "name",
             self.peer.device)  # fmt: skip
        for side in (self.local, self.peer):
            _run("ip", "link", "set", side.device, "netns", side.namespace)
            self._inside(side, "ip", "addr", "add", f"{side.address}/30", "dev", side.device)
            self._inside(side, "ip", "link", "set", side.device, "up")
            self._inside(side, "ip", "link", "set", "lo", "up")

    def _remove(self) -> None:
        for side in (self.local, self.peer):
            subprocess.run(  # noqa: S603  # fixed command
                ["ip", "netns", "del", side.namespace],  # noqa: S607
                capture_output=True,
                check=False,
            )

    @staticmethod
    def _inside(side: Side, *command: str) -> str:
        return _run("ip", "netns", "exec", side.namespace, *command)

    def fault(self, name: str) -> bool | None:
        """Cause "drop_ack" (the peer's packets vanish), "link_down" or "heal".

        Returns True when done, None for a fault that a cable does not have.
        """
        ends = {
            "drop_ack": [(self.peer, self.local)],
            "link_down": [(self.peer, self.local), (self.local, self.peer)],
            "heal": [(self.peer, self.local), (self.local, self.peer)],
        }.get(name)
        if ends is None:
            return None
        for here, there in ends:
            entry = ("ip", "neigh", "replace", there.address, "dev", here.device)
            if name == "heal":
                self._inside(here, *entry, "lladdr", self._hardware(there), "nud", "reachable")
            else:
                self._inside(here, *entry, "lladdr", _NOBODY, "nud", "permanent")
        return True

    def _hardware(self, side: Side) -> str:
        shown = self._inside(side, "cat", f"/sys/class/net/{side.device}/address")
        return shown.strip()


def filled(config: Mapping[str, Any], side: Side) -> dict[str, Any]:
    """Replace ``{address}`` and ``{device}`` in the string values of ``config``."""
    return {
        key: value.replace("{address}", side.address).replace("{device}", side.device)
        if isinstance(value, str)
        else value
        for key, value in config.items()
    }


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"--netns needs {', '.join(missing)}: install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise ConfigError("--netns needs root: namespaces cannot be made without")


def _run(*command: str) -> str:
    found: Sequence[str] = command
    done = subprocess.run(found, capture_output=True, text=True, check=False)  # noqa: S603  # fixed
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
