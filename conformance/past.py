"""Operations that speak to the backend past the core's own validation.

Only these can show what a *target* enforces: the core of a well-behaved peer
would have refused the same descriptors before they reached the wire.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtransport.backend import Blocks, Op
from kvtransport.errors import KVTransportError
from kvtransport_conformance.wire_errors import describe

if TYPE_CHECKING:
    from kvtransport.agent import Agent
    from kvtransport.peer import Peer
    from kvtransport_conformance.tap import Tap

_IDLE_S = 0.0005
_RAW_PEER = 1 << 40


class PastTheCore:
    """Part of ``Station``; names of operations are explained there."""

    if TYPE_CHECKING:
        peers: dict[str, Peer]
        _tap: Tap | None
        _agent: Agent | None

        @property
        def agent(self) -> Agent: ...
        @property
        def tap(self) -> Tap: ...

    def raw_move(
        self, op: str, local: int, remote: int, vectors: Sequence[Sequence[int]],
        key: str = "peer", notify: bytes | None = None, patience_s: float = 10.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Hand unchecked descriptors to the backend; say how that ended.

        ``vectors`` are local offsets, remote offsets and lengths; the result's
        ``outcome`` is "refused", "done", "failed" or "silent".
        """
        low, far, sizes = (np.array(vector, np.uint64) for vector in vectors)
        blocks = Blocks(
            local_region=np.full(len(sizes), local, np.int64),
            local_offset=low,
            remote_region=np.full(len(sizes), remote, np.int64),
            remote_offset=far,
            nbytes=sizes,
        )
        peer_id = self.peers[key].peer_id
        try:
            ticket = self.tap.raw_post(Op(op), peer_id, blocks, notify)
        except KVTransportError as error:
            return {"outcome": "refused", "error": describe(error)}
        return self._raw_end(ticket, patience_s)

    def _raw_end(self, ticket: int, patience_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self.agent.progress()
            event = self.tap.raw_result(ticket)
            if event is not None:
                error = None if event.error is None else describe(event.error)
                return {"outcome": "failed" if error else "done", "error": error}
            time.sleep(_IDLE_S)
        return {"outcome": "silent", "error": None}

    def raw_import(self, body: bytes) -> dict[str, Any] | None:
        """Hand ``body`` to the backend as a peer's export; return its error or None."""
        peer_id = 1 << 40
        try:
            self.tap.import_peer(peer_id, body)
        except KVTransportError as error:
            return describe(error)
        self.tap.drop_peer(peer_id)
        return None

    def raw_export(self) -> bytes:
        return self.tap.export()

    def tap_report(self) -> dict[str, Any]:
        """What the layer below the core saw so far."""
        tap = self.tap
        return {
            "completions": {str(key): count for key, count in tap.completions.items()},
            "posted": sorted(tap.posted),
            "overlaps": tap.overlaps,
            "peers_down": tap.peers_down,
            "notified": tap.notified,
            "foreign_errors": tap.foreign_errors,
        }

    def moved_bytes(self) -> int:
        """Bytes of transfers that the backend reported as successful."""
        return 0 if self._tap is None else self._tap.moved

    def counters(self) -> dict[str, int]:
        return {} if self._agent is None else dict(self.tap.counters())
