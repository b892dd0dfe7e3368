"""One engine's parts, put together: identity, ledger, control plane, policies.

The scheduler side works with these; nothing here depends on a request's state.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from kvtransport.lease.control import ControlPlane, ControlSettings
from kvtransport.lease.holding import Purpose
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.policy.recompute import load_recompute
from kvtransport.policy.retention import load_retention
from kvtransport_vllm import params, tenants
from kvtransport_vllm.content import ContentIdentity
from kvtransport_vllm.holdings import HeldBlocks
from kvtransport_vllm.identity import fingerprint
from kvtransport_vllm.meta import decode_rank_export
from kvtransport_vllm.steps import StepClock
from kvtransport_vllm.turns import Phase, Turn
from kvtransport_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvtransport.policy.recompute import Decision, PullQuestion
    from kvtransport_vllm.config import AdapterConfig
    from kvtransport_vllm.meta import PullReport
    from kvtransport_vllm.params import TransferParams

logger = logging.getLogger("kvtransport.vllm.engine")


class Engine:
    """The parts behind one scheduler side.  Scheduler thread only, unless said."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: AdapterConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # vLLM makes no connector without it
        self.config = config
        self.boot_id = boot_id()
        self.block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.cache_blocks = kv_cache_config.num_blocks
        self.tables = len(kv_cache_config.kv_cache_tensors)
        self.block_nbytes = _page_bytes(kv_cache_config)
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        # Data-parallel ranks may run their steps together: nobody may dawdle.
        self.alone = vllm_config.parallel_config.data_parallel_size == 1
        facts = fingerprint(vllm_config, kv_cache_config, group_tokens=config.group_tokens)
        self.identity = EngineIdentity(
            engine_id=str(transfer.engine_id), fingerprint=facts, versions=versions()
        )
        self.content = ContentIdentity(self.identity.fingerprint_bytes(), config.group_tokens)
        self.ledger = Ledger(
            load_retention(
                config.retention if config.bidirectional_kv_xfer else "off",
                retention_options(config),
            ),
            LedgerSettings(
                cache_blocks=self.cache_blocks,
                block_tokens=(self.block_tokens,),
                group_tokens=config.group_tokens,
                handoff_ttl_s=config.handoff_ttl_s,
            ),
        )
        self.held = HeldBlocks(self.ledger)
        self.recompute = load_recompute(
            config.recompute, recompute_options(config, agent_fingerprint(self.identity).hex())
        )
        self.steps = StepClock(self.recompute)
        self.control = ControlPlane(
            control_settings(config, vllm_config.parallel_config.data_parallel_index),
            self.identity,
            self.ledger,
        )
        self.control.add_status("recompute", self.recompute.describe)
        self.control.start()

    # -- ranks -------------------------------------------------------------

    def set_ranks(self, blobs: dict[tuple[int, int], bytes]) -> None:
        """Serve the workers' exports to peers; rank = pp_rank * tp_size + tp_rank."""
        exports = [decode_rank_export(blob) for blob in blobs.values()]
        # A pull's descriptors are counted over all ranks, so they are asked about that way.
        self.tables = sum(len(e.tables) for e in exports)
        self.block_nbytes = sum(t.block_nbytes for e in exports for t in e.tables)
        self.control.set_agents({pp * self._tp_size + tp: blob for (pp, tp), blob in blobs.items()})

    # -- holding -----------------------------------------------------------

    def hold(self, request: Request, block_ids: tuple[list[int], ...], *, handoff: bool) -> bool:
        """Enter a finished request's computed KV in the ledger and reference its blocks."""
        tokens = computed_tokens(request)
        if tokens < self.config.group_tokens or not self.content.describable(request):
            return False
        blocks = -(-tokens // self.block_tokens)
        ids = tuple(np.asarray(group[:blocks], dtype=np.int32) for group in block_ids)
        if any(len(group) < blocks for group in ids):
            logger.error(
                "request %s: %d tokens computed, but vLLM names only %d blocks; not held",
                request.request_id,
                tokens,
                min(len(group) for group in ids),
            )
            return False
        # The request's own references protect the blocks until ``take`` adds ours.
        holding = self.ledger.insert(
            self.content.chain(request, request.all_token_ids[:tokens]),
            ids,
            request_id=request.request_id,
            purpose=Purpose.HANDOFF if handoff else Purpose.RETAINED,
            tenant=tenants.label(request.cache_salt),
            nbytes=sum(map(len, ids)) * self.block_nbytes,
            saved_s=self.recompute.compute_seconds(tokens),
        )
        if holding is None:
            return False
        self.held.take(ids)
        return True

    def handoff_params(self, request: Request, turn: Turn | None) -> dict[str, Any]:
        """P's answer, which routers copy into D's request."""
        host, port = split_address(self.control.address)
        result = params.handoff(
            engine_id=self.identity.engine_id,
            request_id=request.request_id,
            host=host,
            port=port,
            tp_size=self._tp_size,
        )
        token = self.control.address_token()
        if token:
            result |= {"kvt_address": self.control.address, "kvt_address_token": token}
        if turn is not None:
            result["kvt_turn"] = turn.summary()
            if turn.conversation:
                result["kvt_conversation"] = turn.conversation
        return result

    def admit_address(self, wanted: TransferParams) -> None:
        """Learn a peer that is not configured, if its address is authenticated."""
        if wanted.address and wanted.address_token:
            self.control.admit(wanted.address, wanted.address_token)

    def whom_to_ask(self, wanted: TransferParams) -> list[str] | None:
        """The named engines that are known; everybody when there is none of them."""
        known = {
            text
            for engine in self.control.engines()
            for text in (engine.engine_id, engine.name, engine.address)
        }
        return [name for name in wanted.targets if name in known] or None

    @staticmethod
    def finished_by_length(request: Request) -> bool:
        """P stops after one token; any other end has nothing to hand over."""
        return request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )

    # -- policy ------------------------------------------------------------

    def decide(self, question: PullQuestion) -> Decision:
        return self.recompute.decide(question)

    def observe_transfer(
        self, *, peer: str, report: PullReport, queued_nbytes: int, total_s: float
    ) -> None:
        """Teach the recompute policy what a pull really cost."""
        self.recompute.observe_transfer(
            peer=peer,
            nbytes=report.nbytes + queued_nbytes,
            descriptors=report.descriptors,
            seconds=total_s,
            first_contact=report.first_contact,
        )

    def reserved_blocks(self, turns: Iterable[Turn]) -> int:
        """Blocks that requests loading now will still need for the rest of their prompt."""
        total = 0
        for turn in turns:
            if turn.phase is Phase.LOADING:
                needed = -(-(turn.request.num_tokens + 1) // self.block_tokens)
                total += max(0, needed - turn.request.num_computed_tokens // self.block_tokens)
        return total

    def close(self) -> None:
        self.control.close(timeout_s=2.0)
        self.recompute.close()


def open_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: AdapterConfig
) -> WorkerSide:
    """The worker side of this process's rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    tp_rank = get_tensor_model_parallel_rank()
    rank = get_pp_group().rank_in_group * parallel.tensor_parallel_size + tp_rank
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None  # vLLM makes no connector without it
    facts = fingerprint(vllm_config, kv_cache_config, group_tokens=config.group_tokens)
    return WorkerSide(
        agent_name=f"{transfer.engine_id}.{rank}.{secrets.token_hex(4)}",
        rank=rank,
        config=config,
        fingerprint=agent_fingerprint(EngineIdentity("worker", facts)),
        boot_id=boot_id(),
    )


def agent_fingerprint(identity: EngineIdentity) -> bytes:
    """What agents compare before they import each other: 16 bytes for all facts."""
    return hashlib.blake2b(identity.fingerprint_bytes(), digest_size=16).digest()


def versions() -> dict[str, str]:
    """Versions of what touches the wire; exchanged and shown, not compared."""
    return {name: importlib.metadata.version(name) for name in ("kvtransport", "pyzmq", "msgspec")}


def computed_tokens(request: Request) -> int:
    """Leading tokens of the request whose KV is certainly in its blocks.

    Steps in flight are not counted, and neither is the last sampled token: its
    KV would only be computed by the next step.
    """
    done: int = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, min(done, int(request.num_tokens) - 1))


def boot_id() -> str:
    """Identifies this boot of this machine: CLOCK_MONOTONIC is comparable within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def split_address(address: str) -> tuple[str, int]:
    """``tcp://[::1]:5601`` -> (``::1``, 5601)."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def retention_options(config: AdapterConfig) -> dict[str, Any]:
    """The retention policy's own settings; upstream's key is the default of its TTL."""
    return {"decoder_kv_blocks_ttl": config.decoder_kv_blocks_ttl, **config.retention_config}


def recompute_options(config: AdapterConfig, identity: str) -> dict[str, Any]:
    """The recompute policy's own settings; upstream's key is their threshold.

    ``identity`` keeps what was learned with one model from another.
    """
    own = dict(config.recompute_config)
    threshold = {"kv_recompute_threshold": config.kv_recompute_threshold}
    if config.recompute == "threshold":
        return threshold | own
    if config.recompute == "cost_model":
        return threshold | {"state_identity": identity} | own
    return own


def control_settings(config: AdapterConfig, data_parallel_index: int) -> ControlSettings:
    """The control plane's settings for one data-parallel rank."""
    return ControlSettings(
        listen=shift_port(config.listen, data_parallel_index),
        advertise=shift_port(config.advertise, data_parallel_index),
        peers=config.named_peers,
        secret_file=config.cluster_secret_file,
        lookup_timeout_s=config.lookup_timeout_s,
        lease_s=config.lease_s,
    )


def shift_port(address: str, offset: int) -> str:
    """Give each data-parallel rank its own port; port 0 stays 0."""
    if not address or not offset:
        return address
    head, _, port = address.rpartition(":")
    return address if port == "0" else f"{head}:{int(port) + offset}"


def _page_bytes(config: KVCacheConfig) -> int:
    group = config.kv_cache_groups[0]
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
