"""Saboteurs of what the target must enforce; over TCP, where host declares that it does."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any

import numpy as np

from kvtransport.backend import Blocks, Op, RegionSpec
from kvtransport_conformance.saboteurs.base import BrokenBackend, saboteur

log = logging.getLogger("kvtransport.backends.saboteur")
TCP = {"path": "tcp"}


@saboteur("SEC-02", config=TCP)
class RegistersTooMuch(BrokenBackend):
    """Registers whole double pages, as a careless driver does."""

    def register(self, region: RegionSpec) -> None:
        self.inner.register(replace(region, nbytes=2 * region.nbytes))


@saboteur("NTF-04", "SEC-03", "SEC-06", config=TCP)
class TrustsRegionIds(BrokenBackend):
    """Takes an unknown region id for the peer's first region."""

    def __init__(self) -> None:
        super().__init__()
        self._newest = 3

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        known = (blocks.remote_region >= 1) & (blocks.remote_region <= self._newest)
        blocks = replace(blocks, remote_region=np.where(known, blocks.remote_region, 1))
        self.inner.post(ticket, op, peer_id, blocks, notify)


@saboteur("SEC-04", config=TCP)
class IgnoresAccess(BrokenBackend):
    """Registers everything for reading and writing."""

    def register(self, region: RegionSpec) -> None:
        self.inner.register(replace(region, access=frozenset({"read", "write"})))


@saboteur("SEC-05", perhaps=["CON-06"], config=TCP)
class NeverDeregisters(BrokenBackend):
    """Keeps a region reachable after it was deregistered."""

    def deregister(self, region_id: int) -> None:
        del region_id


@saboteur("SEC-07", config=TCP)
class ListensEverywhere(BrokenBackend):
    """Opens a port on every interface without being told to."""

    def open(self, name: str, config: Any) -> None:
        self.inner.open(name, config)
        self._socket = socket.create_server(("0.0.0.0", 0))  # noqa: S104  # the fault itself

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()
        self.inner.close()


@saboteur("SEC-08")
class LogsKeys(BrokenBackend):
    """Logs what it exports, keys included."""

    def export(self) -> bytes:
        body = self.inner.export()
        log.debug("exported %s", body.hex())
        return body
