"""Neuron, CUDA and host memory over EFA, through NIXL's LIBFABRIC."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtransport.backend import Probe
from kvtransport.capabilities import Capabilities
from kvtransport.errors import BackendUnavailableError
from kvtransport_backends.efa import INFO
from kvtransport_backends.efa.checks import check_environment, probe
from kvtransport_backends.efa.config import EfaConfig
from kvtransport_backends.nixl.connect import Bounded, Connector
from kvtransport_backends.nixl.driver import NativeAgent, find_driver
from kvtransport_backends.nixl.engine import NixlBackend
from kvtransport_backends.nixl.inbox import MAX_PAYLOAD
from kvtransport_backends.nixl.liveness import DETECTION_BOUND_S, Liveness
from kvtransport_backends.nixl.machine import Machine
from kvtransport_backends.nixl.process import spins


class EfaBackend(NixlBackend):
    """NIXL's LIBFABRIC with Neuron or CUDA memory as NIXL's VRAM."""

    info = INFO
    plugin = "LIBFABRIC"
    machine = Machine(Path("/"))

    @classmethod
    def probe(cls, config: EfaConfig) -> Probe:
        version = find_driver(config.module)
        if version is None:
            return Probe(
                available=False,
                reason=f"the Python module {config.module} is not installed",
                hint=cls.info.install_hint,
            )
        return probe(config, version, cls.machine)

    @classmethod
    def kinds(cls, config: EfaConfig) -> frozenset[str]:
        return frozenset({"host"} if config.device == "none" else {"host", config.device})

    @classmethod
    def capabilities(cls, config: EfaConfig) -> Capabilities:
        kinds = cls.kinds(config)
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=frozenset((local, remote) for local in kinds for remote in kinds),
            notify="inline",
            notify_after_data=True,
            completion="local",
            ordering="none",
            cancel="none",
            failure_detection="keepalive" if config.liveness else "none",
            detection_bound_s=DETECTION_BOUND_S if config.liveness else None,
            threading="serialized",
            progress="auto",
            max_notify_bytes=MAX_PAYLOAD,
            max_in_flight=config.max_in_flight,
        )

    def check(self, config: EfaConfig) -> None:
        found = self.probe(config)
        if not found.available:
            raise BackendUnavailableError(found.reason, hint=found.hint, backend=self.info.name)
        check_environment(config)

    def environment(self, config: EfaConfig) -> Mapping[str, str]:
        if config.device != "neuron":
            return {}
        # Shared memory between two processes of one machine does not know
        # Neuron memory, and copies wrong bytes without an error.
        return {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}

    def verify(self, segments: list[str], config: EfaConfig) -> None:
        if config.device == "none" or any("VRAM" in segment for segment in segments):
            return
        raise BackendUnavailableError(
            f"NIXL found no accelerator of kind {config.device}, so that its memory cannot be"
            " registered",
            hint="lspci must show the accelerator in this container; or set device='none'",
            backend=self.info.name,
        )

    def connector(self, agent: NativeAgent, handle: int, config: EfaConfig) -> Connector:
        return Bounded(agent, handle, config.connect_timeout_s)

    def liveness(self, config: EfaConfig) -> Liveness:
        return Liveness(config.liveness, config.connect_timeout_s)

    def may_destroy(self, *, at_exit: bool) -> bool:
        """Whether LIBFABRIC's progress thread would end when it is told to.

        Over TCP it retries for ever what was posted to a peer that died, and
        NIXL's destructor would wait for it with the interpreter locked.
        """
        if at_exit or self._flights or self._connector.busy:
            return False
        return not any(spins(thread) for thread in self._threads)

    def plugin_params(self, config: EfaConfig) -> dict[str, str]:
        return {"striping_threshold": str(config.striping_threshold)}
