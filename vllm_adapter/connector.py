"""``KVTransportConnector``: vLLM's hooks, delegated.

vLLM makes one instance in the scheduler process and one in each worker; each
has only its side.  Nothing is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtransport_vllm import compat, config, logs
from kvtransport_vllm.engine import Engine, open_worker
from kvtransport_vllm.meta import RankHandshake, StepMetadata
from kvtransport_vllm.metrics import TransportMetrics
from kvtransport_vllm.scheduler import SchedulerSide
from kvtransport_vllm.stats import TransportStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtransport_vllm.worker import WorkerSide


class KVTransportConnector(KVConnectorBase_V1, SupportsHMA):
    """KV moves in both directions, by content, under leases."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logs.share_handlers()
        settings = config.load(self._kv_transfer_config.kv_connector_extra_config)
        compat.check(vllm_config, kv_cache_config, settings)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads this right after the constructor; its default is "fail".
            self._kv_transfer_config.kv_load_failure_policy = settings.failure_policy
            self._scheduler_side = SchedulerSide(Engine(vllm_config, kv_cache_config, settings))
        else:
            self._worker_side = open_worker(vllm_config, kv_cache_config, settings)

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler_side is not None  # vLLM calls only our role's hooks
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker_side is not None  # vLLM calls only our role's hooks
        return self._worker_side

    # -- scheduler process -------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self.scheduler_side.bind(
            kv_cache_manager.block_pool, getattr(kv_cache_manager, "watermark_blocks", 0)
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_side.bind(gpu_block_pool, 0)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.set_ranks(
            {rank: m.blob for rank, m in metadata.items() if isinstance(m, RankHandshake)}
        )

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_side.request_finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset_cache()

    # -- worker processes --------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register_kv_caches(kv_caches, self._kv_cache_config)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.handshake()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)  # made by our scheduler side
        self.worker_side.start(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self.worker_side.results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.report()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous; no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks stay where they are and are read from there."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # -- both --------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler_side is None:
            return None
        return self._scheduler_side.step_ended()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return TransportStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return TransportMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.shutdown()
        if self._worker_side is not None:
            self._worker_side.shutdown()
