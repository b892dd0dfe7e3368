"""Run-length coding of block ids: freshly allocated blocks are mostly consecutive.

A coded list is little-endian int32 pairs (first id, length).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import ProtocolError

BlockIds = NDArray[np.int32]

_PAIR = np.dtype("<i4")


def encode_runs(ids: BlockIds) -> bytes:
    """Code a row of block ids, in order."""
    if ids.size == 0:
        return b""
    starts = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = np.concatenate(([0], starts))
    lengths = np.diff(np.append(starts, ids.size))
    return np.column_stack((ids[starts], lengths)).astype(_PAIR).tobytes()


def decode_runs(coded: bytes, *, max_blocks: int) -> BlockIds:
    """The ids that ``encode_runs`` was given.

    Raises ``ProtocolError`` for anything malformed and for more than
    ``max_blocks`` ids; checks before it allocates.
    """
    if len(coded) % 8:
        raise ProtocolError(f"block runs: {len(coded)} bytes are not a row of pairs")
    pairs = np.frombuffer(coded, dtype=_PAIR).reshape(-1, 2).astype(np.int64)
    if pairs.size == 0:
        return np.empty(0, dtype=np.int32)
    first, length = pairs[:, 0], pairs[:, 1]
    if int(first.min()) < 0 or int(length.min()) < 1:
        raise ProtocolError("block runs: an id is negative or a run is empty")
    total = int(length.sum())
    if total > max_blocks or int((first + length).max()) > 0x7FFFFFFF:
        raise ProtocolError(f"block runs: {total} blocks, limit {max_blocks}")
    before = np.cumsum(length) - length
    ids: BlockIds = (np.repeat(first - before, length) + np.arange(total)).astype(np.int32)
    return ids
