"""What the UCX-based backends (cuda, rocm) share: checks and capabilities."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvtransport.backend import Probe
from kvtransport.capabilities import Capabilities
from kvtransport.errors import BackendUnavailableError
from kvtransport_backends.nixl.config import UcxConfig
from kvtransport_backends.nixl.driver import find_driver
from kvtransport_backends.nixl.engine import NixlBackend
from kvtransport_backends.nixl.inbox import MAX_PAYLOAD
from kvtransport_backends.nixl.machine import Machine
from kvtransport_backends.nixl.process import foreign_copies, loaded_libraries

_log = logging.getLogger("kvtransport.nixl")

# UCX reads UCX_MODULES once per process: whether it then read ours.
_verbs_left_out = threading.Event()

DETECTION_BOUND_S = 5.0
"""When UCX reports a peer's death at the latest, counted from the next use of it."""


class UcxBackend(NixlBackend):
    """A NIXL agent on UCX."""

    plugin = "UCX"
    device_kind: ClassVar[str]
    device_files: ClassVar[str]
    """Which files in ``/dev`` a machine with such devices has."""
    machine = Machine(Path("/"))

    @classmethod
    def probe(cls, config: UcxConfig) -> Probe:
        version = find_driver(config.module)
        if version is None:
            return Probe(
                available=False,
                reason=f"the Python module {config.module} is not installed",
                hint=cls.info.install_hint,
            )
        devices = len(cls.machine.devices(cls.device_files))
        details = {
            config.module: version,
            f"{cls.device_kind} devices": str(devices),
            "rdma devices": ", ".join(cls.machine.rdma_devices()) or "none",
        }
        if not devices:
            details["note"] = f"no {cls.device_kind} device here: host memory only"
        return Probe(available=True, details=details)

    @classmethod
    def kinds(cls, config: Any) -> frozenset[str]:  # noqa: ARG003
        return frozenset({"host", cls.device_kind})

    @classmethod
    def capabilities(cls, config: UcxConfig) -> Capabilities:
        kinds = cls.kinds(config)
        detects = config.error_handling == "peer"
        return Capabilities(
            ops=frozenset({"read", "write"}),
            memory=frozenset((local, remote) for local in kinds for remote in kinds),
            notify="inline",
            notify_after_data=True,
            completion="remote_visible",
            ordering="none",
            cancel="none",
            failure_detection="on_use" if detects else "none",
            detection_bound_s=DETECTION_BOUND_S if detects else None,
            threading="serialized",
            progress="auto" if config.progress == "thread" else "manual",
            max_notify_bytes=MAX_PAYLOAD,
            max_in_flight=config.max_in_flight,
        )

    def check(self, config: UcxConfig) -> None:
        probe = self.probe(config)
        if not probe.available:
            self.unavailable(probe.reason, probe.hint)
        others = foreign_copies("libucp", config.module)
        if others:
            self.unavailable(
                f"another copy of UCX is loaded in this process: {', '.join(others)}",
                "two copies break each other: start without the package that loads it"
                " (ucx-py, ucxx, an MPI, HPC-X in LD_PRELOAD)",
            )
        self._check_devices(config)
        self._check_fast_path(config)

    def _check_devices(self, config: UcxConfig) -> None:
        found = self.machine.rdma_devices()
        if found and not self._devices_chosen(config):
            self.unavailable(
                "this machine has RDMA devices, and net_devices does not say whether other"
                " machines may reach this process through them",
                f"set net_devices to the devices to listen on ({found[0]}:1), to 'all', or to"
                " 'lo' for peers on this machine only",
            )

    @staticmethod
    def _devices_chosen(config: UcxConfig) -> bool:
        return bool(config.net_devices or os.environ.get("UCX_NET_DEVICES"))

    def _check_fast_path(self, config: UcxConfig) -> None:
        explicit = config.transports or os.environ.get("UCX_TLS")
        if config.allow_fallback or explicit or self.machine.rdma_devices():
            return
        if self.machine.devices(self.device_files):
            self.unavailable(
                f"this machine has {self.device_kind} devices and no RDMA device, so that peers"
                " on other machines would be reached over TCP",
                self.no_rdma_hint,
            )

    no_rdma_hint: ClassVar[str] = (
        "load the NIC's driver (ibv_devices must list it), name the transports to use"
        " (transports='cuda_ipc,cuda_copy,sm,self' within one machine), or set allow_fallback=true"
    )

    def unavailable(self, reason: str, hint: str) -> None:
        """Raise ``BackendUnavailableError``."""
        raise BackendUnavailableError(reason, hint=hint, backend=self.info.name)

    def plugin_params(self, config: UcxConfig) -> dict[str, str]:
        return {"ucx_error_handling_mode": config.error_handling}

    def environment(self, config: UcxConfig) -> Mapping[str, str]:
        chosen = {"UCX_TLS": config.transports, "UCX_NET_DEVICES": config.net_devices}
        variables = {name: value for name, value in chosen.items() if value}
        if not self._devices_chosen(config):
            # Left alone, UCX listens on every interface of the machine.
            variables["UCX_NET_DEVICES"] = "lo"
        if "UCX_LOG_FILE" not in os.environ:
            variables["UCX_LOG_FILE"] = "stderr"  # its warnings go to stdout otherwise
        if self.machine.verbs_without_hardware() and "UCX_MODULES" not in os.environ:
            # UCX's InfiniBand module loads the verbs providers, and a process
            # that has them without a device ends with a segmentation fault.
            variables["UCX_MODULES"] = "^ib"
            if not loaded_libraries("libucs"):
                _verbs_left_out.set()
            elif not _verbs_left_out.is_set():
                _log.warning(
                    "UCX was loaded before backend %s: this process may crash when it ends;"
                    " set UCX_MODULES=^ib before it starts",
                    self.info.name,
                )
        return variables
