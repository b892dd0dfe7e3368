"""Start real vLLM engines on this machine, and never leave one behind.

For tests, benchmarks, the demo and first steps by hand; production deployments
start engines with their own tools.  Nothing here imports vLLM: engines are
processes of their own, started with the running interpreter.

Lifecycle
    ``EnginePair`` → ``start()`` (processes, health, warm-up) → requests →
    ``stop()``.  All are context managers.  Whatever happens to the starting
    process, SIGKILL included, its engines end (``guard``).
"""

from __future__ import annotations

from kvtransport_vllm.launch.engine import Engine, EngineSpec
from kvtransport_vllm.launch.pair import EnginePair, PairSpec
from kvtransport_vllm.launch.ports import free_ports
from kvtransport_vllm.launch.random_model import RandomModelSpec, prepare_random_model
from kvtransport_vllm.launch.router import router_service
from kvtransport_vllm.launch.service import Service, ServiceError, stop_all, wait_ready

__all__ = [
    "Engine",
    "EnginePair",
    "EngineSpec",
    "PairSpec",
    "RandomModelSpec",
    "Service",
    "ServiceError",
    "free_ports",
    "prepare_random_model",
    "router_service",
    "stop_all",
    "wait_ready",
]
