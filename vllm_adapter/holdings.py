"""Own references on KV blocks: holding blocks without holding requests.

Architecture
    The ledger decides what stays readable; this class turns its decisions into
    references on vLLM's blocks.  A finished request's blocks get one more
    reference (``BlockPool.touch``) when the ledger takes the holding, and lose
    it (``BlockPool.free_blocks``) when the ledger drops it.  vLLM frees the
    request itself normally.

Threading
    Scheduler thread only: the block pool has no lock.  The control thread may
    grant leases meanwhile; it only marks holdings in the ledger.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from kvtransport.lease.holding import Dropped
    from kvtransport.lease.ledger import Ledger
    from kvtransport_vllm.meta import BlockIds

logger = logging.getLogger("kvtransport.vllm.holdings")


class HeldBlocks:
    """The block references of one engine's ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pool: BlockPool | None = None
        self._quarantined: dict[str, BlockIds] = {}
        self.dropped: list[Dropped] = []
        """Holdings dropped since the statistics were last taken."""

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def pool(self) -> BlockPool:
        if self._pool is None:
            msg = "vLLM has not bound its block pool yet"
            raise RuntimeError(msg)
        return self._pool

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(ids) for groups in self._quarantined.values() for ids in groups)

    def take(self, block_ids: BlockIds) -> None:
        """Add one reference to each block of a holding just entered."""
        self.pool.touch([self.pool.blocks[i] for ids in block_ids for i in ids])

    def sweep(self) -> int:
        """Drop the references of every holding the ledger no longer keeps.

        Returns the number of references dropped; a block that somebody else
        still uses does not become free by it.
        """
        count = 0
        for dropped in self._ledger.collect():
            count += self._free(dropped.holding.block_ids)
            self.dropped.append(dropped)
        return count

    def make_room(self, wanted: int) -> bool:
        """Give up retained holdings until ``wanted`` blocks are free.

        Leased holdings and undelivered handoffs stay.  Returns whether
        anything was given up; less than ``wanted`` may be free afterwards.
        """
        gave = self.sweep() > 0
        while (missing := wanted - self.free_blocks) > 0:
            if not self._ledger.make_room(missing):
                break
            gave = self.sweep() > 0 or gave
        return gave

    def reset(self) -> bool:
        """Give up everything not leased; whether nothing is held any more."""
        empty = self._ledger.reset()
        self.sweep()
        return empty and not self._quarantined

    def quarantine(self, request_id: str, block_ids: BlockIds) -> None:
        """Keep for ever the blocks into which a transfer may still write."""
        if request_id in self._quarantined:
            return
        self.take(block_ids)
        self._quarantined[request_id] = block_ids
        logger.error(
            "transfer of request %s is not known to be quiet; %d of its blocks stay out of use",
            request_id,
            sum(len(ids) for ids in block_ids),
        )

    def _free(self, block_ids: BlockIds) -> int:
        # The end of a sequence is evicted before its beginning, as vLLM does.
        ids = [i for group in block_ids for i in np.flip(group).tolist()]
        self.pool.free_blocks(self.pool.blocks[i] for i in ids)
        return len(ids)
