"""What the scheduler side and the worker side tell each other each step.

vLLM carries these objects between its own processes; they never leave the
engine.  What crosses to another engine is in ``kvtransport.lease.protocol``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtransport.errors import MalformedMetadataError

BlockIds = tuple[NDArray[np.int32], ...]


class PeerKey(NamedTuple):
    """One life of one engine; a restarted engine is another peer."""

    engine_id: str
    incarnation: str


class TableSpec(msgspec.Struct, frozen=True, array_like=True):
    """One block table of a rank: ``count`` blocks in the region ``region``."""

    region: str
    base: int
    stride: int
    block_nbytes: int
    count: int


class RankExport(msgspec.Struct, frozen=True, tag="kvt-rank/1"):
    """All that the same rank of a peer needs: agent metadata and tables."""

    agent: bytes
    tables: tuple[TableSpec, ...]


def decode_rank_export(blob: bytes) -> RankExport:
    """Decode a peer's rank export; ``MalformedMetadataError`` on anything else."""
    try:
        return msgspec.msgpack.decode(blob, type=RankExport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"the peer's rank export cannot be decoded: {error}"
        raise MalformedMetadataError(msg, native=error) from error


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """A worker's encoded ``RankExport`` on its way to the scheduler side."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class PullJob:
    """Read these blocks from that peer.

    Block ``remote_blocks[g][i]`` of KV group g lands in ``local_blocks[g][i]``.
    ``deadline_s`` is the lease's end on CLOCK_MONOTONIC of this machine; what
    arrives later does not count.
    """

    request_id: str
    peer: PeerKey
    local_blocks: BlockIds
    remote_blocks: BlockIds
    deadline_s: float
    timeout_s: float


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler side to worker side, once per step.

    ``idle``: pulls are all that this engine has to do, so a worker may wait for one.
    """

    pulls: list[PullJob] = field(default_factory=list)
    peers: dict[PeerKey, Mapping[int, bytes]] = field(default_factory=dict)
    retired: list[PeerKey] = field(default_factory=list)
    renewed: dict[str, float] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    boot_id: str = ""
    idle: bool = False


@dataclass(frozen=True, slots=True)
class PullReport:
    """How one pull ended on one rank (or, aggregated, on all of them).

    ``error`` is empty after success, else one of the outcome names of
    ``kvtransport_vllm.outcomes``.  With ``quarantined`` the destination blocks
    may still be written to and must never be given to anybody.
    """

    nbytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    error: str = ""
    detail: str = ""
    quarantined: bool = False
    first_contact: bool = False

    def merge(self, other: PullReport) -> PullReport:
        """Combine two ranks: bytes add up, the slowest and the worst decide."""
        worst = self if self.error else other
        return PullReport(
            nbytes=self.nbytes + other.nbytes,
            descriptors=self.descriptors + other.descriptors,
            seconds=max(self.seconds, other.seconds),
            error=worst.error,
            detail=worst.detail,
            quarantined=self.quarantined or other.quarantined,
            first_contact=self.first_contact or other.first_contact,
        )


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker side to scheduler side, only in steps in which a pull ended."""

    pulls: dict[str, PullReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        if not isinstance(other, StepReport):
            msg = f"cannot aggregate {type(other).__name__} with StepReport"
            raise TypeError(msg)
        pulls = dict(self.pulls)
        for request_id, report in other.pulls.items():
            mine = pulls.get(request_id)
            pulls[request_id] = report if mine is None else mine.merge(report)
        return StepReport(pulls)
