from __future__ import annotations

import copy

import pytest

from kvtransport_conformance.evidence import judge

HOST = {"boot_id": "b1", "host": "h1", "net_namespace": "n1", "preload": "", "nics": [],
        "modules": ["nvidia"]}  # fmt: skip
FACTS = {
    "process": HOST,
    "peer_process": HOST,
    "memory": [{"kind": "host"}],
    "probe": {"details": {}},
}


def facts(**changes):
    found = copy.deepcopy(FACTS)
    for key, value in changes.items():
        if isinstance(value, dict):
            found[key] = {**found[key], **value}
        else:
            found[key] = value
    return found


CUDA = [{"kind": "cuda", "name": "H100", "driver": "570"}]


@pytest.mark.parametrize(
    ("seen", "moved", "counters", "tier", "words"),
    [
        ({}, 0, {}, "E0", "no byte moved"),
        (facts(), 0, {}, "E0", "no byte moved"),
        (facts(), 100, {}, "E2", "host memory only"),
        (facts(peer_process={"net_namespace": "n2"}), 100, {}, "E2", "two network namespaces"),
        (facts(memory=CUDA), 100, {}, "E3", "cuda device H100, driver 570"),
        (facts(memory=CUDA, process={"modules": []}), 100, {}, "E1", "no driver"),
        (
            facts(memory=[{"kind": "npu", "driver": "1", "module": "npu0"}]),
            1,
            {},
            "E1",
            "no driver",
        ),
        (facts(memory=[{"kind": "npu", "driver": "1", "module": "nvidia"}]), 1, {}, "E3", "npu"),
        (facts(memory=[{"kind": "host", "driver": "570"}]), 1, {}, "E2", "host memory only"),
        (facts(memory=CUDA, peer_process={"boot_id": "b2", "host": "h2"}), 1, {}, "E4", "h2"),
        (facts(memory=[{"kind": "neuron", "name": "simulated-neuron"}]), 1, {}, "E1", "simulated"),
        (facts(memory=CUDA, process={"preload": "/x/fake.so"}), 1, {}, "E1", "LD_PRELOAD"),
        (facts(process={"preload": "/x/libtcmalloc.so.4:/x/libiomp5.so"}), 1, {}, "E2", "host"),
        (facts(memory=CUDA, probe={"details": {"emulated": "efa"}}), 1, {}, "E1", "emulated"),
        (facts(process={"nics": ["mlx5_0"]}), 9, {"hw.rdma_write": 9}, "E3", "mlx5_0"),
        (facts(process={"nics": ["mlx5_0"]}), 9, {"hw.rdma_write": 8}, "E2", "no NIC took part"),
        (facts(process={"nics": ["mlx5_0"]}), 9, {"vm_read_bytes": 99}, "E2", "no NIC took part"),
        (facts(), 9, {"hw.rdma_write": 99}, "E2", "no NIC took part"),
    ],
)
def test_tier_follows_from_what_was_seen(seen, moved, counters, tier, words):
    found = judge(seen, moved, counters)
    assert found.tier == tier
    assert words in found.why
