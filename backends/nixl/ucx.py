"""What the UCX-based backends (cuda, rocm) share: options, checks, capabilities."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvtransport.backend import Probe
from kvtransport.capabilities import Capabilities
from kvtransport.errors import BackendUnavailableError, ConfigError
from kvtransport_backends.nixl.config import NixlConfig
from kvtransport_backends.nixl.driver import find_driver
from kvtransport_backends.nixl.engine import NixlBackend
from kvtransport_backends.nixl.inbox import MAX_PAYLOAD
from kvtransport_backends.nixl.process import loaded_libraries

ErrorMode = Literal["peer", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxConfig(NixlConfig):
    """Options of a UCX-based backend.

    ``transports``
        UCX's transports, comma separated (``UCX_TLS``): ``"tcp"``,
        ``"rc,cuda"``.  Empty leaves the choice to UCX and the environment.
    ``net_devices``
        Network devices, comma separated (``UCX_NET_DEVICES``): ``"mlx5_0:1"``,
        ``"eth0"``, ``"lo"``.  UCX listens on every interface otherwise.
    ``error_handling``
        ``"peer"``: a dead peer is noticed on use.  ``"none"``: never noticed;
        some transports are only chosen then.
    """

    transports: str = ""
    net_devices: str = ""
    error_handling: ErrorMode = "peer"

    def __post_init__(self) -> None:
        NixlConfig.__post_init__(self)
        if self.error_handling not in get_args(ErrorMode):
            raise ConfigError(
                f"error_handling must be one of {', '.join(get_args(ErrorMode))},"
                f" not {self.error_handling!r}"
            )


class UcxBackend(NixlBackend):
    """A NIXL agent on UCX."""

    plugin = "UCX"
    device_kind: str

    @classmethod
    def probe(cls, config: UcxConfig) -> Probe:
        version = find_driver(config.module)
        if version is None:
            return Probe(
                available=False,
                reason=f"the Python module {config.module} is not installed",
                hint=cls.info.install_hint,
            )
        return Probe(available=True, details={config.module: version})

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
            detection_bound_s=5.0 if detects else None,
            threading="serialized",
            progress="auto" if config.progress == "thread" else "manual",
            max_notify_bytes=MAX_PAYLOAD,
            max_in_flight=config.max_in_flight,
        )

    def check(self, config: UcxConfig) -> None:
        probe = self.probe(config)
        if not probe.available:
            raise BackendUnavailableError(probe.reason, hint=probe.hint, backend=self.info.name)

    def plugin_params(self, config: UcxConfig) -> dict[str, str]:
        return {"ucx_error_handling_mode": config.error_handling}

    def environment(self, config: UcxConfig) -> Mapping[str, str]:
        chosen = {"UCX_TLS": config.transports, "UCX_NET_DEVICES": config.net_devices}
        return {name: value for name, value in chosen.items() if value}
