"""One prefill and one decode engine that know each other.

Both get the same connector configuration except for the address each listens
on and the peer that each names, as ``kvtransport``'s operator guide tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvtransport_vllm.launch.engine import Engine, EngineSpec, usable_cores
from kvtransport_vllm.launch.ports import free_ports
from kvtransport_vllm.launch.service import Service, stop_all, wait_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """How to start a 1P1D pair.

    ``common`` holds the fields of ``EngineSpec`` that both engines share;
    ``prefill`` and ``decode`` add to it or replace it for one of them.
    ``connector`` False starts two plain engines.  ``backend_config`` and
    ``options`` go into the connector's configuration, the latter at its top
    level; ``prefill_options`` and ``decode_options`` add to ``options`` or
    replace them for one engine.  Ports that are not given are chosen freely.
    """

    model: Path
    logs: Path
    backend: str = "host"
    backend_config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    prefill_options: Mapping[str, Any] = field(default_factory=dict)
    decode_options: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    connector: bool = True
    prefill_port: int | None = None
    decode_port: int | None = None


def connector_config(
    *,
    listen: int,
    peers: Mapping[str, int],
    backend: str = "host",
    backend_config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``--kv-transfer-config`` object of an engine with control port ``listen``.

    ``peers`` are the other engines on this machine: name -> control port.
    """
    return {
        "kv_connector": "KVTransportConnector",
        "kv_connector_module_path": "kvtransport_vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "backend": backend,
            "backend_config": dict(backend_config or {}),
            "listen": f"tcp://127.0.0.1:{listen}",
            "peers": {name: f"tcp://127.0.0.1:{port}" for name, port in peers.items()},
            "bidirectional_kv_xfer": True,
            **(options or {}),
        },
    }


class EnginePair:
    """Two engines, started and stopped together; ``prefill`` and ``decode`` name them."""

    def __init__(self, spec: PairSpec) -> None:
        control = free_ports(4)
        cores = usable_cores(2)
        self.spec = spec
        self.prefill = self._engine(
            "prefill",
            port=spec.prefill_port or control[2],
            control=(control[0], control[1]),
            cores=cores[0],
            options={**spec.options, **spec.prefill_options},
            extra=spec.prefill,
        )
        self.decode = self._engine(
            "decode",
            port=spec.decode_port or control[3],
            control=(control[1], control[0]),
            cores=cores[1],
            options={**spec.options, **spec.decode_options},
            extra=spec.decode,
        )

    def _engine(
        self,
        role: str,
        *,
        port: int,
        control: tuple[int, int],
        cores: Sequence[int],
        options: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> Engine:
        listen, peer = control
        other = "decode" if role == "prefill" else "prefill"
        config = connector_config(
            listen=listen,
            peers={other: peer},
            backend=self.spec.backend,
            backend_config=self.spec.backend_config,
            options=options,
        )
        fields: dict[str, Any] = {
            "name": role,
            "port": port,
            "log": self.spec.logs / f"{role}.log",
            "cores": cores,
            "connector": config if self.spec.connector else None,
        }
        return Engine(EngineSpec(model=self.spec.model, **{**fields, **self.spec.common, **extra}))

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def start(
        self,
        *,
        timeout_s: float = 300.0,
        progress: Callable[[Service], None] | None = None,
    ) -> Self:
        """Start both side by side, wait until both serve, warm both up.

        Raises ``ServiceError`` when one does not come up; none runs then.
        """
        with ExitStack() as cleanup:
            cleanup.callback(self.stop)
            for engine in self.engines:
                engine.start()
            wait_ready(self.engines, timeout_s=timeout_s, progress=progress)
            for engine in self.engines:
                engine.warm_up()
            cleanup.pop_all()
        return self

    def stop(self) -> None:
        """End both; idempotent."""
        stop_all(self.engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
