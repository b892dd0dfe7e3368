"""The worker side of the connector: one rank's memory and its reads.

Lifecycle
    ``register_kv_caches`` opens the backend and registers each KV allocation
    once.  ``start`` posts the step's reads, ``results`` collects what ended.
    Each pull is reported exactly once, whatever happened to it; after the
    report nothing of it can land, or the report says ``quarantined``.

Threading
    The worker's thread only.  The backend's own threads move the bytes.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvtransport import errors
from kvtransport.agent import Agent
from kvtransport.layout.blocks import BlockPair, BlockTable, Pair
from kvtransport.options import AgentOptions
from kvtransport.transfer import Transfer, TransferState
from kvtransport_vllm import kv_layout, outcomes
from kvtransport_vllm.meta import (
    PeerKey,
    PullJob,
    PullReport,
    RankExport,
    RankHandshake,
    StepMetadata,
    StepReport,
    decode_rank_export,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtransport.peer import Peer
    from kvtransport_vllm.config import AdapterConfig

logger = logging.getLogger("kvtransport.vllm.worker")

IDLE_WAIT_S = 0.005
"""How long a step that has nothing to compute waits for a pull to end.

Without it the pull would be noticed by a later step, and vLLM pauses a
millisecond between two steps without work.  A request that arrives meanwhile
waits as long at most.
"""

_IDLE_PAUSE_S = 50e-6


@dataclass(slots=True)
class KnownPeer:
    """The same rank of another engine, imported."""

    peer: Peer
    tables: tuple[BlockTable, ...]
    fresh: bool = True


@dataclass(slots=True)
class ActivePull:
    """A pull that has not been reported; ``transfer`` is None until it is posted."""

    job: PullJob
    deadline_s: float
    transfer: Transfer | None = None
    first_contact: bool = False
    give_up_s: float = field(default=0.0)


class WorkerSide:
    """Moves blocks between this rank's KV cache and the same rank of peers."""

    def __init__(
        self,
        *,
        agent_name: str,
        rank: int,
        config: AdapterConfig,
        fingerprint: bytes,
        boot_id: str,
        open_agent: Callable[..., Agent] = Agent.open,
    ) -> None:
        """``open_agent`` has the signature of ``Agent.open``; tests put layers in between."""
        self._name = agent_name
        self._rank = rank
        self._config = config
        self._fingerprint = fingerprint
        self._boot_id = boot_id
        self._open_agent = open_agent
        self._agent: Agent | None = None
        self._tables: tuple[BlockTable, ...] = ()
        self._export: RankExport | None = None
        self._peers: dict[PeerKey, KnownPeer] = {}
        self._failed_peers: dict[PeerKey, str] = {}
        self._pulls: dict[str, ActivePull] = {}
        self._ended: dict[str, PullReport] = {}
        self._unreported: dict[str, PullReport] = {}
        self._idle = False

    @property
    def agent(self) -> Agent:
        if self._agent is None:
            msg = "register_kv_caches has not been called"
            raise errors.ClosedError(msg)
        return self._agent

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig
    ) -> None:
        """Open the backend and register every KV allocation of this rank."""
        layout = kv_layout.describe(kv_caches, config)
        agent = self._open_agent(
            self._config.backend,
            name=self._name,
            config=self._config.backend_config,
            fingerprint=self._fingerprint,
            options=AgentOptions(
                deadline_s=self._config.transfer_timeout_s, drain_s=self._config.drain_timeout_s
            ),
        )
        regions = {
            a.region: agent.register(
                (a.address, a.nbytes, a.owner),
                name=a.region,
                kind=memory_kind(a.device_type),
                device=a.device_index,
                # Peers pull; whoever could write here could forge KV.
                access="r",
            )
            for a in layout.allocations
        }
        self._agent = agent
        self._tables = tuple(
            BlockTable(regions[t.region], t.base, t.stride, t.block_nbytes, t.count)
            for t in layout.tables
        )
        self._export = RankExport(agent.metadata(), layout.tables)

    def handshake(self) -> RankHandshake | None:
        """What the same rank of a peer needs to read from this one."""
        if self._export is None:
            return None
        return RankHandshake(msgspec.msgpack.encode(self._export))

    # -- one step ----------------------------------------------------------

    def start(self, meta: StepMetadata) -> None:
        """Import and retire peers, post this step's reads, cancel unwanted ones."""
        for key in meta.retired:
            self._retire(key)
        for key, agents in meta.peers.items():
            self._import(key, agents)
        for request_id, deadline_s in meta.renewed.items():
            pull = self._pulls.get(request_id)
            if pull is not None:
                pull.deadline_s = deadline_s
        for job in meta.pulls:
            self._begin(job, meta.boot_id)
        for request_id in meta.cancelled:
            if (pull := self._pulls.get(request_id)) is not None:
                _cancel(pull)
        self._idle = meta.idle

    def _import(self, key: PeerKey, agents: Mapping[int, bytes]) -> None:
        self._failed_peers.pop(key, None)
        try:
            if self._rank not in agents:
                msg = f"engine {key.engine_id} has no rank {self._rank}, only {sorted(agents)}"
                raise errors.IncompatiblePeerError(msg)  # one handler for all
            export = decode_rank_export(agents[self._rank])
            peer = self.agent.add_peer(export.agent)
            self._peers[key] = KnownPeer(peer, self._match(peer, export))
        except errors.KVTransportError as error:
            logger.warning("cannot import rank %d of engine %s: %s", self._rank, key[0], error)
            self._failed_peers[key] = str(error)

    def _match(self, peer: Peer, export: RankExport) -> tuple[BlockTable, ...]:
        """The peer's tables, in our order; both must cut blocks the same way."""
        if len(export.tables) != len(self._tables):
            msg = (
                f"tables: this engine has {len(self._tables)} block tables per rank, "
                f"the peer {len(export.tables)}"
            )
            raise errors.IncompatiblePeerError(msg)
        for mine, theirs in zip(self._tables, export.tables, strict=True):
            if mine.block_nbytes != theirs.block_nbytes:
                msg = (
                    f"block_nbytes: this engine has {mine.block_nbytes}, "
                    f"the peer {theirs.block_nbytes}"
                )
                raise errors.IncompatiblePeerError(msg)
        return tuple(
            BlockTable(peer.region(t.region), t.base, t.stride, t.block_nbytes, t.count)
            for t in export.tables
        )

    def _retire(self, key: PeerKey) -> None:
        self._failed_peers.pop(key, None)
        known = self._peers.pop(key, None)
        if known is None:
            return
        try:
            self.agent.remove_peer(known.peer, drain_s=0.0)
        except errors.KVTransportError as error:
            logger.warning("engine %s is retired, not cleanly: %s", key.engine_id, error)

    def _begin(self, job: PullJob, boot_id: str) -> None:
        pull = ActivePull(job, job.deadline_s, give_up_s=time.monotonic() + job.timeout_s)
        self._pulls[job.request_id] = pull
        if boot_id != self._boot_id:
            # Lease deadlines are readings of the scheduler machine's clock.
            self._end(pull, outcomes.LEASE_EXPIRED, "scheduler and worker run on two machines")
            return
        self._post(pull)

    def _post(self, pull: ActivePull) -> None:
        known = self._peers.get(pull.job.peer)
        if known is None:
            detail = self._failed_peers.get(pull.job.peer, "the peer was never announced")
            self._end(pull, outcomes.HANDSHAKE, detail)
            return
        pull.first_contact = known.fresh
        try:
            pairs = self._pairs(pull.job, known)
            timeout_s = max(0.0, pull.give_up_s - time.monotonic())
            pull.transfer = self.agent.read(known.peer, pairs, deadline_s=timeout_s)
            known.fresh = False
        except errors.BackpressureError as error:
            # The queue is full: try again next step, until the pull's own deadline.
            if time.monotonic() >= min(pull.give_up_s, pull.deadline_s):
                self._end(pull, outcomes.TRANSFER_TIMEOUT, str(error))
        except errors.KVTransportError as error:
            self._end(pull, outcome_of(error), str(error))

    def _pairs(self, job: PullJob, known: KnownPeer) -> list[BlockPair]:
        (local,), (remote,) = job.local_blocks, job.remote_blocks
        return [
            Pair.blocks(mine, theirs, local, remote)
            for mine, theirs in zip(self._tables, known.tables, strict=True)
        ]

    # -- results -----------------------------------------------------------

    def results(self) -> tuple[set[str], set[str]]:
        """(finished, failed) request ids; the failed ones are among the finished."""
        if self._pulls:
            self.agent.poll()
            if self._idle:
                self._wait_for_one()
        now = time.monotonic()
        for pull in list(self._pulls.values()):
            if pull.transfer is None:
                self._post(pull)
            elif pull.transfer.done:
                self._finish(pull, pull.transfer)
            elif now > pull.deadline_s:
                _cancel(pull)
        # Told exactly once: a second report of one request would end the engine.
        ended, self._ended = self._ended, {}
        self._unreported.update(ended)
        return set(ended), {request_id for request_id, r in ended.items() if r.error}

    def _wait_for_one(self) -> None:
        """Until a pull has ended or cannot go on by itself, but not for long."""
        until = time.monotonic() + IDLE_WAIT_S
        while time.monotonic() < until and not self._ended:
            if any(pull.transfer is None or pull.transfer.done for pull in self._pulls.values()):
                return
            time.sleep(_IDLE_PAUSE_S)
            self.agent.poll()

    def report(self) -> StepReport | None:
        """Details for the scheduler side; call after ``results``, once per step."""
        ended, self._unreported = self._unreported, {}
        return StepReport(ended) if ended else None

    def _finish(self, pull: ActivePull, transfer: Transfer) -> None:
        if transfer.state is TransferState.QUARANTINED:
            self._end(pull, outcomes.TRANSFER_TIMEOUT, "not known to be quiet", quarantined=True)
            return
        if transfer.state is not TransferState.DONE:
            error = transfer.error or errors.TransferFailedError("no reason given")
            self._end(pull, outcome_of(error), str(error))
            return
        ended_s = transfer.finished_s or time.monotonic()
        if ended_s > pull.deadline_s:
            # All bytes came, but the owner may have reused the blocks before.
            self._end(pull, outcomes.LEASE_EXPIRED, "the read ended after its lease")
            return
        self._ended[pull.job.request_id] = PullReport(
            nbytes=transfer.nbytes,
            descriptors=transfer.descriptors,
            seconds=ended_s - transfer.started_s,
            first_contact=pull.first_contact,
        )
        del self._pulls[pull.job.request_id]

    def _end(self, pull: ActivePull, error: str, detail: str, *, quarantined: bool = False) -> None:
        logger.warning("pull of request %s: %s (%s)", pull.job.request_id, error, detail)
        self._ended[pull.job.request_id] = PullReport(
            error=error, detail=detail, quarantined=quarantined
        )
        self._pulls.pop(pull.job.request_id, None)

    def shutdown(self) -> None:
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        try:
            agent.close(drain_s=self._config.drain_timeout_s)
        except errors.UndrainedError as error:
            logger.warning("closed with memory quarantined: %s", error)


def _cancel(pull: ActivePull) -> None:
    """Ask for an early end; a backend that has no cancel goes on to its deadline."""
    if pull.transfer is not None:
        with suppress(errors.UnsupportedError):
            pull.transfer.cancel()


def memory_kind(device_type: str) -> str:
    """Our memory kind for torch's device type."""
    import torch

    if device_type == "cpu":
        return "host"
    if device_type == "cuda" and torch.version.hip is not None:
        return "rocm"
    if device_type == "privateuseone":
        return "neuron"
    return device_type


def outcome_of(error: errors.KVTransportError) -> str:
    """The outcome that an error of the transport stands for."""
    for kind, outcome in (
        (errors.PeerLostError, outcomes.PEER_LOST),
        (errors.StaleDescriptorError, outcomes.STALE),
        (errors.TransferTimeoutError, outcomes.TRANSFER_TIMEOUT),
        (errors.TransferCancelledError, outcomes.LEASE_EXPIRED),
        (errors.PeerError, outcomes.HANDSHAKE),
    ):
        if isinstance(error, kind):
            return outcome
    return outcomes.TRANSPORT
