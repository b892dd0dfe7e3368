"""What every layer shares: passing everything through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtransport.backend import Backend, BackendInfo, Blocks, Event, Op, Probe, RegionSpec
from kvtransport.capabilities import Capabilities


class Layer(Backend):
    """A backend that wraps the opened or unopened backend ``inner``.

    It is configured with the inner backend's configuration; its own settings
    are constructor arguments.  Declarations are asked of the instance, because
    they depend on what is wrapped.
    """

    PRIVATE = 1 << 60
    """Region ids and tickets from here on belong to layers; the core stays below."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.info: BackendInfo = inner.info  # type: ignore[misc]  # per instance on purpose

    def probe(self, config: Any) -> Probe:  # type: ignore[override]  # asks the instance
        return self.inner.probe(config)

    def capabilities(self, config: Any) -> Capabilities:  # type: ignore[override]
        return self.inner.capabilities(config)

    def open(self, name: str, config: Any) -> None:
        self.inner.open(name, config)

    def register(self, region: RegionSpec) -> None:
        self.inner.register(region)

    def deregister(self, region_id: int) -> None:
        self.inner.deregister(region_id)

    def export(self) -> bytes:
        return self.inner.export()

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self.inner.import_peer(peer_id, body)

    def drop_peer(self, peer_id: int) -> None:
        self.inner.drop_peer(peer_id)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        self.inner.post(ticket, op, peer_id, blocks, notify)

    def cancel(self, ticket: int) -> None:
        self.inner.cancel(ticket)

    def poll(self) -> Sequence[Event]:
        return self.inner.poll()

    def close(self) -> None:
        self.inner.close()

    def counters(self) -> Mapping[str, int]:
        return self.inner.counters()
