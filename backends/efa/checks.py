"""What must be in place before NIXL's LIBFABRIC is started, and how to fix it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import msgspec

from kvtransport.backend import Probe
from kvtransport.errors import BackendUnavailableError
from kvtransport_backends.efa import preflight
from kvtransport_backends.efa.config import EfaConfig
from kvtransport_backends.nixl.machine import Machine
from kvtransport_backends.nixl.process import loaded_libraries

_PREFLIGHT_TIMEOUT_S = 30.0

_FIXES = {
    "libfabric.so.1": (
        "on AWS run the EFA installer (it puts libfabric into /opt/amazon/efa); elsewhere add a"
        " libfabric of version 1.21 or newer to LD_LIBRARY_PATH"
    ),
    "libhwloc.so.15": "install hwloc (Debian, Ubuntu: apt install libhwloc15)",
    "libcudart.so.12": "pip install nvidia-cuda-runtime-cu12 and add its lib folder to"
    " LD_LIBRARY_PATH",
    "libcuda.so.1": "the plugin in NIXL's wheels links against CUDA's driver even where it serves"
    " Neuron memory: install the driver, or build NIXL without CUDA",
    "libnrt.so.1": "install aws-neuronx-runtime-lib and add /opt/aws/neuron/lib to"
    " LD_LIBRARY_PATH; or set device='cuda' or 'none'",
}


class Findings(msgspec.Struct, frozen=True):
    """What ``preflight.py`` prints."""

    missing: dict[str, str]
    providers: list[str]
    device_memory: list[str]
    libfabric: str


def probe(config: EfaConfig, version: str, machine: Machine) -> Probe:
    """What the kernel says; nothing is loaded."""
    efa, neuron = machine.efa_devices(), machine.devices("neuron[0-9]*")
    details = {
        config.module: version,
        "efa devices": ", ".join(efa) or "none",
        "neuron devices": str(len(neuron)),
    }
    if config.emulated:
        return Probe(available=True, details={**details, "emulated": "yes"})
    if not efa and not config.allow_fallback:
        return Probe(
            available=False,
            reason="there is no EFA device (none of vendor 1d0f in /sys/class/infiniband)",
            hint="attach an EFA interface to the instance and run the EFA installer, or set"
            " allow_fallback=true and device='none' to use TCP",
            details=details,
        )
    if config.device == "neuron" and not neuron:
        return Probe(
            available=False,
            reason="device is 'neuron' and there is no Neuron device (/dev/neuron*)",
            hint="install aws-neuronx-dkms, or set device='cuda' or 'none'",
            details=details,
        )
    return Probe(available=True, details=details)


def check_environment(config: EfaConfig) -> None:
    """Check variables and loaded libraries; raises ``BackendUnavailableError``."""
    shm = os.environ.get("FI_EFA_ENABLE_SHM_TRANSFER", "0")
    if config.device == "neuron" and shm.lower() not in {"0", "false", "no", "off"}:
        _refuse(
            f"FI_EFA_ENABLE_SHM_TRANSFER={shm} gives wrong data between two processes of one"
            " machine with Neuron memory",
            "unset it or set FI_EFA_ENABLE_SHM_TRANSFER=0",
        )
    findings = examine(config)
    for library, why in findings.missing.items():
        _refuse(f"{library} cannot be loaded ({why})", _FIXES[library])
    if not config.allow_fallback:
        _check_provider(findings)
    _check_device_memory(config, findings)
    here = os.path.realpath(findings.libfabric)
    others = [path for path in loaded_libraries("libfabric") if os.path.realpath(path) != here]
    if others:
        _refuse(
            f"another copy of libfabric is loaded in this process: {', '.join(others)};"
            f" NIXL would load {findings.libfabric}",
            "two copies break each other: point LD_LIBRARY_PATH at one of them for all, or start"
            " without the package that brings the other",
        )


def examine(config: EfaConfig) -> Findings:
    """Ask libfabric in a process of its own; raises ``BackendUnavailableError``."""
    libraries = ["libfabric.so.1", "libhwloc.so.15", "libcuda.so.1", "libcudart.so.12"]
    if config.device == "neuron":
        libraries.append("libnrt.so.1")
    relevant = ("LD_", "FI_", "HWLOC_")
    environment = {k: v for k, v in os.environ.items() if k.startswith(relevant)}
    return _ask(tuple(libraries), tuple(sorted(environment.items())))


@lru_cache(maxsize=8)
def _ask(libraries: tuple[str, ...], _environment: tuple[tuple[str, str], ...]) -> Findings:
    """Run the preflight; the same environment gives the same answer."""
    command = [sys.executable, str(Path(preflight.__file__)), *libraries]
    try:
        done = subprocess.run(  # noqa: S603  # our own script
            command, capture_output=True, timeout=_PREFLIGHT_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(done.stdout, type=Findings)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()[-300:]
        _refuse(
            f"asking libfabric for its providers ended with status {error.returncode}: {said}",
            "run fi_info; FI_LOG_LEVEL=info says what it does",
        )
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        _refuse(f"asking libfabric for its providers failed: {error}", "run fi_info")
    raise AssertionError("unreachable")


def _check_provider(findings: Findings) -> None:
    # NIXL takes cxi before efa, and efa before tcp, without a word.
    offered = findings.providers
    if "efa" in offered and "cxi" not in offered:
        return
    chosen = "cxi" if "cxi" in offered else ", ".join(offered) or "nothing"
    hint = "run fi_info -p efa; the device may be hidden from this container, or taken"
    if os.environ.get("FI_PROVIDER"):
        hint = f"unset FI_PROVIDER, which is {os.environ['FI_PROVIDER']!r}; then {hint}"
    if chosen == "cxi":
        hint = "set FI_PROVIDER=efa"
    _refuse(
        f"libfabric ({findings.libfabric}) would not use EFA: it offers {chosen}",
        f"{hint}; or set allow_fallback=true and device='none' to use TCP",
    )


def _check_device_memory(config: EfaConfig, findings: Findings) -> None:
    # NIXL would register device memory as host memory, without a word.
    if config.device == "none" or "efa" in findings.device_memory:
        return
    _refuse(
        f"libfabric's efa provider ({findings.libfabric}) cannot register {config.device} memory",
        "use the libfabric of the EFA installer, which is built for accelerators, and an EFA"
        " driver with peer-memory or dma-buf support; or set device='none' and stage through"
        " host memory",
    )


def _refuse(reason: str, hint: str) -> None:
    raise BackendUnavailableError(reason, hint=hint, backend="efa")
