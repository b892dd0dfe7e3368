"""A whole engine without a model: vLLM's real scheduler, our real connector.

The "model" is exact and depends on every byte of KV.  The KV row of position p
is a hash of row p-1 *as it stands in the cache* and of token p; a sampled token
is a hash of all rows of the request as they stand in the cache.  So one wrong,
stale or missing block changes the answer, and an answer can be compared with
``reference``, which uses no cache at all.

Everything else is real: block pool, prefix cache, preemption, the control plane
over loopback, the worker side and the host backend, which copies real memory.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvtransport import registry
from kvtransport.agent import Agent
from kvtransport.layers.fault import FaultLayer, FaultPlan
from kvtransport_vllm.connector import KVTransportConnector
from kvtransport_vllm.engine import agent_fingerprint, boot_id
from kvtransport_vllm.launch import RandomModelSpec, prepare_random_model
from kvtransport_vllm.stats import TransportStats, split_series
from kvtransport_vllm.worker import WorkerSide

BLOCK = 16
LAYERS = 2
VOCAB = 251
ROW = 2 * 1 * 8  # key and value, one head of 8 float32 numbers, as 64-bit words: 8


def mix(previous: int, token: int) -> int:
    digest = hashlib.blake2b(f"{previous}:{token}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample(rows: np.ndarray[Any, Any]) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(rows).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """The answer of an engine that never reuses anything."""
    tokens = list(prompt)
    rows: list[int] = []
    answer: list[int] = []
    for _ in range(max_tokens):
        for position in range(len(rows), len(tokens)):
            rows.append(mix(rows[-1] if position else 0, tokens[position]))
        stacked = np.array([[row ^ layer for layer in range(LAYERS)] for row in rows], np.uint64)
        answer.append(sample(stacked))
        tokens.append(answer[-1])
    return answer


@lru_cache(maxsize=1)
def model_dir() -> Path:
    return prepare_random_model(RandomModelSpec())


def cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    page = spec.page_size_bytes
    names = [f"layer.{i}" for i in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=page * blocks * LAYERS,
                layers=names,
                layer_stride=page * blocks,
                block_stride=page,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
    )


class Sim:
    """One engine.  ``step`` is one scheduler step with its forward pass."""

    _serial = itertools.count()

    def __init__(
        self,
        name: str,
        *,
        blocks: int = 200,
        prefix_caching: bool = True,
        max_batched_tokens: int = 512,
        max_model_len: int = 2048,
        max_seqs: int = 64,
        connector: bool = True,
        faults: FaultPlan | None = None,
        **extra: Any,
    ) -> None:
        self.name = name
        self.faults = faults
        self.vllm_config = self._config(
            prefix_caching, max_batched_tokens, max_model_len, max_seqs, connector, extra
        )
        self.cache = cache_config(blocks)
        self.vllm_config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(
            self.vllm_config,
            self.cache,
            StructuredOutputManager(self.vllm_config),
            block_size=BLOCK,
        )
        self.kv = np.zeros((LAYERS, blocks, BLOCK, 8), np.uint64)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.answers: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        self.finished: dict[str, str] = {}
        self.preemptions = 0
        self.hold_results = False
        """Keep what the worker has to report, as if transfers took longer."""
        self.worker: WorkerSide | None = None
        self.stats = TransportStats()
        if connector:
            self._open_worker(blocks)
            self._tap_stats()

    def _config(
        self,
        prefix_caching: bool,
        max_batched_tokens: int,
        max_model_len: int,
        max_seqs: int,
        connector: bool,
        extra: dict[str, Any],
    ) -> VllmConfig:
        config = EngineArgs(
            model=str(model_dir()),
            dtype="float32",
            block_size=BLOCK,
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_batched_tokens,
            max_num_seqs=max_seqs,
            enable_prefix_caching=prefix_caching,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ).create_engine_config()
        config.cache_config.block_size = BLOCK
        if connector:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="KVTransportConnector",
                kv_connector_module_path="kvtransport_vllm",
                kv_role="kv_both",
                engine_id=f"{self.name}-{next(Sim._serial)}",
                kv_connector_extra_config={"backend": "host", **extra},
            )
        return config

    def _open_worker(self, blocks: int) -> None:
        side = self.side
        engine = side._engine  # the harness stands where vLLM's worker does
        self.worker = WorkerSide(
            agent_name=f"{engine.identity.engine_id}.0",
            rank=0,
            config=engine.config,
            fingerprint=agent_fingerprint(engine.identity),
            boot_id=boot_id(),
            open_agent=self._open_agent if self.faults else Agent.open,
        )
        self.tensor = torch.from_numpy(self.kv.view(np.uint8).reshape(-1))
        caches = {f"layer.{i}": self.tensor for i in range(LAYERS)}
        self.worker.register_kv_caches(caches, self.cache)
        handshake = self.worker.handshake()
        assert handshake is not None
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})

    def _open_agent(self, backend: str, **arguments: Any) -> Agent:
        assert self.faults is not None
        return Agent(FaultLayer(registry.load(backend)(), self.faults), **arguments)

    def counted(self, name: str, **labels: str) -> float:
        """A counter's total so far, over all series that have these labels."""
        total = 0.0
        for key, value in self.stats.data["counters"].items():
            found, found_labels = split_series(key)
            if found == name and labels.items() <= found_labels.items():
                total += value
        return total

    def _tap_stats(self) -> None:
        """Keep what the scheduler takes from the connector after each step."""
        take = self.connector.get_kv_connector_stats

        def tapped() -> Any:
            stats = take()
            if stats is not None:
                self.stats.aggregate(stats)
            return stats

        self.connector.get_kv_connector_stats = tapped  # type: ignore[method-assign]

    @property
    def connector(self) -> KVTransportConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, KVTransportConnector)
        return connector

    @property
    def side(self) -> Any:
        return self.connector.scheduler_side

    @property
    def address(self) -> str:
        return str(self.side._engine.control.address)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    # -- requests ----------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher
            if self.vllm_config.cache_config.enable_prefix_caching
            else None,
        )
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def empty(self, timeout_s: float = 15.0) -> None:
        """Empty the prefix cache and everything held; leases may have to end first."""
        end = time.monotonic() + timeout_s
        while not self.scheduler.reset_prefix_cache(reset_connector=True):
            assert time.monotonic() < end, f"{self.name} still holds blocks"
            self.step()
            time.sleep(0.05)

    # -- one step ----------------------------------------------------------

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self._forward(output)
        if self.worker is not None:
            self.worker.start(output.kv_connector_metadata)
        result = ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={r: i for i, r in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=[self._sampled(r) for r in output.num_scheduled_tokens],
            kv_connector_output=self._connector_output(),
        )
        outputs = self.scheduler.update_from_output(output, result)
        for group in outputs.values():
            for item in group.outputs:
                self.answers[item.request_id].extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finished[item.request_id] = str(item.finish_reason)
                    self.params[item.request_id] = item.kv_transfer_params
        return output

    def _connector_output(self) -> KVConnectorOutput | None:
        if self.worker is None or self.hold_results:
            return None
        finished, failed = self.worker.results()
        return KVConnectorOutput(
            finished_recving=finished,
            failed_recving=failed,
            kv_connector_worker_meta=self.worker.report(),
        )

    def _forward(self, output: SchedulerOutput) -> None:
        """Write the KV row of each scheduled token, from what the cache holds."""
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            start = request.num_computed_tokens - count
            for position in range(start, start + count):
                previous = int(self._row(request_id, position - 1)[0]) if position else 0
                value = mix(previous, request.all_token_ids[position])
                block, slot = self._slot(request_id, position)
                for layer in range(LAYERS):
                    self.kv[layer, block, slot, :] = np.uint64(value ^ layer)

    def _sampled(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []
        rows = np.stack([self._row(request_id, p) for p in range(request.num_computed_tokens)])
        return [sample(rows)]

    def _slot(self, request_id: str, position: int) -> tuple[int, int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return blocks[position // BLOCK], position % BLOCK

    def _row(self, request_id: str, position: int) -> np.ndarray[Any, Any]:
        block, slot = self._slot(request_id, position)
        return self.kv[:, block, slot, 0]

    # -- running -----------------------------------------------------------

    def run(
        self,
        until: Callable[[], bool] | None = None,
        *,
        timeout_s: float = 20.0,
        max_steps: int = 20_000,
    ) -> None:
        """Step until ``until`` holds, or until nothing is left to do."""
        end = time.monotonic() + timeout_s
        for _ in range(max_steps):
            if until() if until is not None else not self.scheduler.has_requests():
                return
            output = self.step()
            if not output.num_scheduled_tokens:
                time.sleep(0.0005)
            if time.monotonic() > end:
                break
        msg = f"{self.name} did not get there: {list(self.scheduler.requests)} are left"
        raise AssertionError(msg)

    def finish(self, request_id: str, **kwargs: Any) -> list[int]:
        self.run(lambda: request_id in self.finished, **kwargs)
        return self.answers[request_id]

    def close(self) -> None:
        if self.worker is not None:
            self.connector.shutdown()
            self.worker.shutdown()


class SimPair:
    """A prefill and a decode engine that know each other."""

    def __init__(self, *, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> None:
        from kvtransport_vllm.launch import free_ports

        ports = free_ports(2)
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        self.p = Sim("p", listen=addresses[0], peers=[addresses[1]], **(p or {}))
        self.d = Sim("d", listen=addresses[1], peers=[addresses[0]], **(d or {}))
        self._turn = itertools.count()
        self.wait_connected()

    def wait_connected(self, timeout_s: float = 10.0) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if all(s.side._engine.control.engines() for s in (self.p, self.d)):
                return
            time.sleep(0.01)
        msg = "the control planes did not find each other"
        raise AssertionError(msg)

    def turn(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        salt: str | None = None,
        p_params: dict[str, Any] | None = None,
    ) -> tuple[list[int], dict[str, Any]]:
        """One chat turn through P and D; the answer and P's account of the turn."""
        name = f"turn-{next(self._turn)}"
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **(p_params or {})}
        self.p.add(name, prompt, params=wanted, salt=salt)
        first = self.p.finish(name)
        params = self.p.params[name]
        self.p.run()
        self.d.add(name, prompt, max_tokens=max_tokens, params=params, salt=salt)
        answer = self.d.finish(name)
        self.d.run()
        assert first[0] == answer[0], "P and D disagree about the first token"
        return answer, (params or {}).get("kvt_turn", {})

    def close(self) -> None:
        self.p.close()
        self.d.close()
