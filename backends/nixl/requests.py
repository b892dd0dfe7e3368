"""Making NIXL transfer requests from descriptors."""

from __future__ import annotations

import numpy as np

from kvtransport.backend import Op
from kvtransport_backends.nixl.driver import Driver, NativeAgent
from kvtransport_backends.nixl.local import LocalRegions
from kvtransport_backends.nixl.parts import Part, common_unit, rows
from kvtransport_backends.nixl.peers import Peer
from kvtransport_backends.nixl.tables import UnitHistory, expand


class Requests:
    """Chooses between prepared tables and plain lists."""

    def __init__(
        self, driver: Driver, agent: NativeAgent, plugin_handle: int, local: LocalRegions
    ) -> None:
        self._driver = driver
        self._agent = agent
        self._backends = [plugin_handle]
        self._local = local
        self._units = UnitHistory()
        bindings = driver.bindings
        self._ops = {Op.READ: bindings.NIXL_READ, Op.WRITE: bindings.NIXL_WRITE}

    def make(self, peer: Peer, op: Op, part: Part, notify: bytes) -> int:
        """A NIXL transfer handle.

        Raises ``StaleDescriptorError`` when a region was withdrawn since the
        part was cut, and NIXL's exceptions; nothing is posted.
        """
        # NIXL itself would report DONE, or crash, on withdrawn memory.
        self._local.book.check(part.local)
        peer.book.check(part.remote)
        unit = common_unit(part.blocks)
        if unit and self._units.returning(unit):
            handle = self._from_tables(peer, op, part, notify, unit)
            if handle is not None:
                return handle
        return self._from_lists(peer, op, part, notify)

    def _from_lists(self, peer: Peer, op: Op, part: Part, notify: bytes) -> int:
        blocks, driver = part.blocks, self._driver
        local = rows(blocks.local_region, blocks.local_offset, blocks.nbytes, part.local)
        remote = rows(blocks.remote_region, blocks.remote_offset, blocks.nbytes, part.remote)
        return self._agent.createXferReq(
            self._ops[op],
            driver.transfer_list(part.local[0].kind, local),
            driver.transfer_list(part.remote[0].kind, remote),
            peer.name,
            notify,
            self._backends,
        )

    def _from_tables(self, peer: Peer, op: Op, part: Part, notify: bytes, unit: int) -> int | None:
        blocks = part.blocks
        here = self._local.tables.get(self._local.book, part.local[0].kind, unit)
        there = peer.tables.get(peer.book, part.remote[0].kind, unit)
        if here is None or there is None:
            return None
        local = here.rows(blocks.local_region, blocks.local_offset, part.local)
        remote = there.rows(blocks.remote_region, blocks.remote_offset, part.remote)
        if len(local) > 1 and unit != int(blocks.nbytes.max()):
            counts = (blocks.nbytes // np.uint64(unit)).astype(np.int64)
            local, remote = expand(local, counts), expand(remote, counts)
        return self._agent.makeXferReq(
            self._ops[op], here.handle, local, there.handle, remote, notify, self._backends, False
        )
