"""Making NIXL transfer requests from descriptors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtransport.backend import Blocks, Op
from kvtransport_backends.nixl.driver import Driver, NativeAgent
from kvtransport_backends.nixl.local import LocalRegions
from kvtransport_backends.nixl.peers import Peer
from kvtransport_backends.nixl.regions import RegionBook
from kvtransport_backends.nixl.tables import Indices, Tables, UnitHistory, common_unit, expand


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

    def make(self, peer: Peer, op: Op, blocks: Blocks, notify: bytes) -> int:
        """A NIXL transfer handle; both sides of ``blocks`` have one memory kind.

        Raises ``StaleDescriptorError`` and NIXL's exceptions; nothing is posted.
        """
        unit = common_unit(blocks)
        if unit and self._units.returning(unit):
            handle = self._from_tables(peer, op, blocks, notify, unit)
            if handle is not None:
                return handle
        return self._from_lists(peer, op, blocks, notify)

    def _from_lists(self, peer: Peer, op: Op, blocks: Blocks, notify: bytes) -> int:
        here, there = self._local.book, peer.book
        local_kind = here.get(int(blocks.local_region[0])).kind
        remote_kind = there.get(int(blocks.remote_region[0])).kind
        local = here.rows(blocks.local_region, blocks.local_offset, blocks.nbytes)
        remote = there.rows(blocks.remote_region, blocks.remote_offset, blocks.nbytes)
        return self._agent.createXferReq(
            self._ops[op],
            self._driver.transfer_list(local_kind, local),
            self._driver.transfer_list(remote_kind, remote),
            peer.name,
            notify,
            self._backends,
        )

    def _from_tables(
        self, peer: Peer, op: Op, blocks: Blocks, notify: bytes, unit: int
    ) -> int | None:
        local = _lookup(
            self._local.tables, self._local.book, blocks.local_region, blocks.local_offset, unit
        )
        remote = _lookup(peer.tables, peer.book, blocks.remote_region, blocks.remote_offset, unit)
        if local is None or remote is None:
            return None
        local_rows, remote_rows = local[1], remote[1]
        counts = (blocks.nbytes // np.uint64(unit)).astype(np.int64)
        if len(counts) > 1 and int(counts.max()) > 1:
            local_rows, remote_rows = expand(local_rows, counts), expand(remote_rows, counts)
        return self._agent.makeXferReq(
            self._ops[op],
            local[0],
            local_rows,
            remote[0],
            remote_rows,
            notify,
            self._backends,
            False,
        )


def _lookup(
    tables: Tables,
    book: RegionBook,
    regions: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    unit: int,
) -> tuple[int, Indices] | None:
    table = tables.get(book, book.get(int(regions[0])).kind, unit)
    if table is None:
        return None
    return table.handle, table.rows(regions, offsets, unit)
