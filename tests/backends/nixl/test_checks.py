"""What is refused before NIXL is started, and the fix that each refusal names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtransport.config import decode
from kvtransport.errors import BackendUnavailableError, ConfigError
from kvtransport_backends.cuda.backend import CudaBackend
from kvtransport_backends.cuda.config import CudaConfig
from kvtransport_backends.efa import checks
from kvtransport_backends.efa.backend import EfaBackend
from kvtransport_backends.efa.checks import Findings
from kvtransport_backends.efa.config import EfaConfig
from kvtransport_backends.nixl.machine import Machine
from kvtransport_backends.nixl.process import loaded_libraries
from kvtransport_backends.rocm.backend import RocmBackend
from kvtransport_backends.rocm.config import RocmConfig


def make_machine(root: Path, *devices: str, rdma: dict[str, str] | None = None) -> Machine:
    """A file system with device files and RDMA devices of given vendors."""
    (root / "dev").mkdir()
    for name in devices:
        (root / "dev" / name).touch()
    for name, vendor in (rdma or {}).items():
        folder = root / "sys" / "class" / "infiniband" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
    return Machine(root)


def on(backend: type, machine: Machine):
    """A backend class that believes in ``machine``."""
    return type("On", (backend,), {"machine": machine})()


MELLANOX, AMAZON = "0x15b3", "0x1d0f"


def test_a_gpu_without_rdma_does_not_fall_back_to_tcp(tmp_path, monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    backend = on(CudaBackend, make_machine(tmp_path, "nvidia0", "nvidiactl"))
    with pytest.raises(BackendUnavailableError, match=r"over TCP.*allow_fallback=true"):
        backend.check(CudaConfig())
    backend.check(CudaConfig(allow_fallback=True))
    backend.check(CudaConfig(transports="cuda_ipc,cuda_copy,sm,self"))
    monkeypatch.setenv("UCX_TLS", "tcp")
    backend.check(CudaConfig())


def test_a_gpu_with_rdma_and_a_machine_without_either_are_fine(tmp_path, monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "plain").mkdir()
    gpu = make_machine(tmp_path / "gpu", "nvidia0", rdma={"mlx5_0": MELLANOX})
    on(CudaBackend, gpu).check(CudaConfig(net_devices="mlx5_0:1"))
    plain = on(CudaBackend, make_machine(tmp_path / "plain"))
    plain.check(CudaConfig())
    assert "host memory only" in plain.probe(CudaConfig()).details["note"]


def test_rdma_devices_are_neither_ignored_nor_opened_unasked(tmp_path, monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    backend = on(CudaBackend, make_machine(tmp_path, "nvidia0", rdma={"mlx5_0": MELLANOX}))
    with pytest.raises(BackendUnavailableError, match=r"net_devices.*mlx5_0:1"):
        backend.check(CudaConfig())
    for chosen in ("mlx5_0:1", "all", "lo"):
        backend.check(CudaConfig(net_devices=chosen))
        assert backend.environment(CudaConfig(net_devices=chosen))["UCX_NET_DEVICES"] == chosen
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    backend.check(CudaConfig())
    assert "UCX_NET_DEVICES" not in backend.environment(CudaConfig())


def test_ucx_listens_on_loopback_only_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    backend = on(CudaBackend, make_machine(tmp_path))
    assert backend.environment(CudaConfig())["UCX_NET_DEVICES"] == "lo"


def test_rocm_names_what_its_ipc_needs(tmp_path, monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_MEM_MMAP_HOOK_MODE", raising=False)
    backend = on(RocmBackend, make_machine(tmp_path, "kfd"))
    config = {"module": "nixl_cu12"}  # the engine is the same; no package has nixl_rocm
    with pytest.raises(BackendUnavailableError, match="error_handling='none'"):
        backend.check(RocmConfig(**config))
    with pytest.raises(BackendUnavailableError, match="rocm_ipc"):
        backend.check(RocmConfig(**config, transports="rocm_ipc,rocm_copy"))
    backend.check(RocmConfig(**config, transports="rocm_ipc,rocm_copy", error_handling="none"))
    monkeypatch.setenv("UCX_MEM_MMAP_HOOK_MODE", "none")
    with pytest.raises(BackendUnavailableError, match="unset UCX_MEM_MMAP_HOOK_MODE"):
        backend.check(RocmConfig(**config, allow_fallback=True))


def test_rocm_without_its_nixl_says_how_to_get_it():
    probe = RocmBackend.probe(RocmConfig())
    assert not probe.available
    assert "nixl_rocm" in probe.reason
    assert "-Dwheel_variant=rocm" in probe.hint


def test_verbs_providers_without_hardware_turn_ucx_ib_off(tmp_path, monkeypatch):
    """With them UCX crashes at exit: seen with Debian's ibverbs-providers."""
    monkeypatch.delenv("UCX_MODULES", raising=False)
    machine = make_machine(tmp_path)
    assert "UCX_MODULES" not in on(CudaBackend, machine).environment(CudaConfig())
    folder = tmp_path / "etc" / "libibverbs.d"
    folder.mkdir(parents=True)
    (folder / "mlx5.driver").touch()
    assert on(CudaBackend, machine).environment(CudaConfig())["UCX_MODULES"] == "^ib"
    monkeypatch.setenv("UCX_MODULES", "all")
    assert "UCX_MODULES" not in on(CudaBackend, machine).environment(CudaConfig())
    monkeypatch.delenv("UCX_MODULES")
    (tmp_path / "sys" / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert "UCX_MODULES" not in on(CudaBackend, machine).environment(CudaConfig())


def test_efa_needs_an_efa_device_and_a_neuron_device(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "nic").mkdir()
    (tmp_path / "both").mkdir()
    mellanox = make_machine(tmp_path / "bare", "neuron0", rdma={"mlx5_0": MELLANOX})
    probe = on(EfaBackend, mellanox).probe(EfaConfig())
    assert not probe.available
    assert "1d0f" in probe.reason
    assert "allow_fallback=true" in probe.hint
    nic_only = on(EfaBackend, make_machine(tmp_path / "nic", rdma={"rdmap0s6": AMAZON}))
    probe = nic_only.probe(EfaConfig())
    assert not probe.available
    assert "/dev/neuron" in probe.reason
    assert nic_only.probe(EfaConfig(device="cuda")).available
    both = make_machine(tmp_path / "both", "neuron0", rdma={"rdmap0s6": AMAZON})
    assert on(EfaBackend, both).probe(EfaConfig()).available


GOOD = Findings(missing={}, providers=["efa", "tcp"], device_memory=["efa"], libfabric="/x/lib")

REFUSALS = [
    ({"missing": {"libnrt.so.1": "no such file"}}, {}, "aws-neuronx-runtime-lib"),
    ({"missing": {"libfabric.so.1": "no such file"}}, {}, "EFA installer"),
    ({"missing": {"libhwloc.so.15": "no such file"}}, {}, "libhwloc15"),
    ({"missing": {"libcuda.so.1": "no such file"}}, {}, "build NIXL without CUDA"),
    ({"missing": {"libcudart.so.12": "no such file"}}, {}, "nvidia-cuda-runtime-cu12"),
    ({"providers": ["tcp", "sockets"]}, {}, "offers tcp, sockets.*fi_info -p efa"),
    ({"providers": ["tcp"]}, {"FI_PROVIDER": "tcp"}, "unset FI_PROVIDER"),
    ({"providers": ["cxi", "efa"]}, {}, "FI_PROVIDER=efa"),
    ({"device_memory": []}, {}, "cannot register neuron memory"),
    ({}, {"FI_EFA_ENABLE_SHM_TRANSFER": "1"}, "FI_EFA_ENABLE_SHM_TRANSFER=0"),
]


@pytest.mark.parametrize(("finding", "variables", "fix"), REFUSALS)
def test_efa_names_the_fix(monkeypatch, finding, variables, fix):
    import msgspec

    for name in ("FI_PROVIDER", "FI_EFA_ENABLE_SHM_TRANSFER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = msgspec.structs.replace(GOOD, **finding)
    monkeypatch.setattr(checks, "examine", lambda _config: found)
    with pytest.raises(BackendUnavailableError, match=fix):
        checks.check_environment(EfaConfig())


def test_efa_accepts_a_good_environment_and_a_permitted_fallback(monkeypatch):
    monkeypatch.delenv("FI_EFA_ENABLE_SHM_TRANSFER", raising=False)
    monkeypatch.setattr(checks, "loaded_libraries", lambda _stem: [])
    monkeypatch.setattr(checks, "examine", lambda _config: GOOD)
    checks.check_environment(EfaConfig())
    slow = Findings(missing={}, providers=["tcp"], device_memory=[], libfabric="/x/lib")
    monkeypatch.setattr(checks, "examine", lambda _config: slow)
    checks.check_environment(EfaConfig(allow_fallback=True, device="none"))
    with pytest.raises(BackendUnavailableError, match="cannot register neuron memory"):
        checks.check_environment(EfaConfig(allow_fallback=True))


def test_the_preflight_runs_and_names_what_is_missing():
    found = checks.examine(EfaConfig())
    assert "libnrt.so.1" in found.missing or "EFA_EMULATION_LEVEL" in os.environ


def test_a_second_libfabric_in_the_process_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "examine", lambda _config: GOOD)
    monkeypatch.setattr(checks, "loaded_libraries", lambda _stem: ["/opt/mpi/libfabric.so.1"])
    with pytest.raises(BackendUnavailableError, match=r"/opt/mpi/libfabric\.so\.1"):
        checks.check_environment(EfaConfig())


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libucp.so.0.0.0
7f01-7f02 r--p 00000000 08:01 12 /usr/lib/libucp.so.0.0.0
7f02-7f03 r-xp 00000000 08:01 13 /venv/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0
7f03-7f04 r-xp 00000000 08:01 14 /usr/lib/libucp_extra.so
7f04-7f05 rw-p 00000000 00:00 0 [heap]
"""


def test_loaded_libraries_are_told_by_name_and_path(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert loaded_libraries("libucp", maps) == [
        "/usr/lib/libucp.so.0.0.0",
        "/venv/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0",
    ]


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (CudaConfig, {"progress": "sometimes"}, "progress"),
        (CudaConfig, {"progress_interval_us": 0}, "progress_interval_us"),
        (CudaConfig, {"part_bytes": 5}, "part_bytes"),
        (CudaConfig, {"error_handling": "maybe"}, "error_handling"),
        (CudaConfig, {"transport": "tcp"}, "transports"),
        (CudaConfig, {"module": "../evil"}, "module"),
        (EfaConfig, {"progress": "manual"}, "progress"),
        (EfaConfig, {"device": "gpu"}, "device"),
        (EfaConfig, {"liveness": "localhost"}, "liveness"),
        (EfaConfig, {"connect_timeout_s": 0.0}, "connect_timeout_s"),
        (EfaConfig, {"striping_threshold": 1}, "striping_threshold"),
    ],
)
def test_wrong_options_are_named(kind, values, named):
    with pytest.raises(ConfigError, match=named):
        decode(kind, values)


def test_a_module_that_is_not_there_and_a_plugin_that_is_not_there():
    with pytest.raises(BackendUnavailableError, match="nixl_cu99 is not installed"):
        CudaBackend().open("a", CudaConfig(module="nixl_cu99"))
    other = type("Other", (CudaBackend,), {"plugin": "NOSUCH"})
    with pytest.raises(BackendUnavailableError, match="no plugin NOSUCH, only"):
        other().open("a", CudaConfig())


def test_capabilities_follow_the_configuration():
    assert CudaBackend.capabilities(CudaConfig()).progress == "auto"
    assert CudaBackend.capabilities(CudaConfig(progress="manual")).progress == "manual"
    assert CudaBackend.capabilities(CudaConfig(error_handling="none")).failure_detection == "none"
    assert ("host", "cuda") in CudaBackend.capabilities(CudaConfig()).memory
    assert EfaBackend.capabilities(EfaConfig(device="none")).memory == {("host", "host")}
    assert EfaBackend.capabilities(EfaConfig()).failure_detection == "none"
    assert EfaBackend.capabilities(EfaConfig()).completion == "local"
    assert EfaBackend.capabilities(EfaConfig(liveness="0.0.0.0")).failure_detection == "keepalive"
    for declared in (CudaBackend.capabilities(CudaConfig()), EfaBackend.capabilities(EfaConfig())):
        assert declared.cancel == "none"
        assert declared.target_enforces == frozenset()
        assert declared.ordering == "none"
