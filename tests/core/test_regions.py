"""Registration: buffers, limits, ownership."""

from __future__ import annotations

import array
import gc
import mmap
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support.loopback import CAPABILITIES, Loopback, LoopbackConfig

from kvtransport.agent import Agent
from kvtransport.errors import (
    ConfigError,
    RegistrationError,
    RegistrationLimitError,
    StaleDescriptorError,
    UnsupportedError,
)


@pytest.fixture
def make():
    agents = []

    def build(**capabilities):
        backend = Loopback()
        config = LoopbackConfig(replace(CAPABILITIES, **capabilities))
        agents.append(Agent(backend, name="r", config=config))
        return agents[-1], backend

    yield build
    for agent in agents:
        agent.close()


@dataclass
class FakeDevice:
    type: str


class FakeTensor:
    """What the core looks at in a torch tensor, which it must not import."""

    def __init__(self, device="cpu", contiguous=True):
        self.memory = np.zeros(64, np.uint8)
        self.device = FakeDevice(device)
        self.nbytes = 64
        self._contiguous = contiguous

    def data_ptr(self):
        return self.memory.ctypes.data

    def is_contiguous(self):
        return self._contiguous


def buffers():
    yield "bytearray", bytearray(100), 100
    yield "array", array.array("d", [1.0] * 10), 80
    yield "numpy", np.zeros((4, 5), np.float32), 80
    yield "numpy slice", np.zeros(100, np.uint8)[3:60], 57
    yield "memoryview", memoryview(bytearray(50))[7:], 43
    yield "mmap", mmap.mmap(-1, 4096), 4096
    yield "tensor", FakeTensor(), 64
    yield "zero dimensions", np.array(5, np.int64), 8


@pytest.mark.parametrize(
    ("buffer", "nbytes"), [b[1:] for b in buffers()], ids=[b[0] for b in buffers()]
)
def test_buffers(make, buffer, nbytes):
    agent, backend = make()
    region = agent.register(buffer)
    assert region.nbytes == nbytes
    (spec,) = backend.regions.values()
    assert (spec.address, spec.nbytes) == (region.address, nbytes)
    if isinstance(buffer, np.ndarray):
        assert spec.address == buffer.ctypes.data
    agent.deregister(region)
    assert backend.regions == {}


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (bytearray(), "empty"),
        (np.zeros((0, 3)), "empty"),
        ((4096, 0, None), "empty"),
        ((0, 8, None), "address"),
        ((-4096, 8, None), "address"),
        (((1 << 64) - 4, 8, None), "address"),
        ((4096, 8), "tuple"),
        (("a", 8, None), "tuple"),
        (np.zeros((4, 4))[:, 1], "contiguous"),
        (FakeTensor(contiguous=False), "contiguous"),
        (FakeTensor("cuda"), "'cuda' but kind is 'host'"),
        (object(), "buffer protocol"),
        (None, "buffer protocol"),
        ([1, 2], "buffer protocol"),
        ("text", "buffer protocol"),
        (bytes(8), "access='r'"),
    ],
)
def test_unusable_buffers(make, buffer, words):
    agent, backend = make()
    with pytest.raises(RegistrationError, match=words):
        agent.register(buffer)
    assert backend.regions == {}
    assert agent.regions == ()


def test_host_tensor_as_device_memory(make):
    agent, _ = make(memory=frozenset({("cuda", "cuda")}))
    with pytest.raises(RegistrationError, match="'cpu' but kind is 'cuda'"):
        agent.register(FakeTensor(), kind="cuda")
    agent.register(FakeTensor("cuda"), kind="cuda")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "hots"}, UnsupportedError, "did you mean 'host'"),
        ({"kind": "neuron"}, UnsupportedError, "host memory"),
        ({"access": "x"}, RegistrationError, "'rw'"),
        ({"access": None}, RegistrationError, "'rw'"),
        ({"name": ""}, RegistrationError, "name"),
        ({"name": "x" * 300}, RegistrationError, "name"),
    ],
)
def test_bad_options(make, options, error, words):
    agent, backend = make()
    with pytest.raises(error, match=words):
        agent.register(bytearray(8), **options)
    assert backend.regions == {}


def test_limits(make):
    agent, _ = make(max_regions=2, max_region_bytes=100, min_align=8)
    base = np.zeros(256, np.uint64)
    agent.register(base[:2], name="1")
    with pytest.raises(RegistrationLimitError, match=r"104 bytes.*100"):
        agent.register(base[:13], name="2")
    with pytest.raises(RegistrationError, match="multiple of 8"):
        agent.register(base.view(np.uint8)[1:9], name="2")
    agent.register(base[2:4], name="2")
    with pytest.raises(RegistrationLimitError, match="limit is 2"):
        agent.register(base[4:5], name="3")


def test_same_buffer_twice(make):
    agent, _ = make()
    buffer = bytearray(8)
    one, two = agent.register(buffer), agent.register(buffer)
    assert one.region_id != two.region_id
    agent.deregister(one)
    assert agent.regions == (two,)
    with pytest.raises(StaleDescriptorError):
        agent.deregister(one)


def test_generation_counts_registrations_of_a_name(make):
    agent, _ = make()
    region = agent.register(bytearray(8), name="kv")
    with pytest.raises(RegistrationError, match="'kv' is registered already"):
        agent.register(bytearray(8), name="kv")
    agent.deregister(region)
    again = agent.register(bytearray(8), name="kv")
    assert again.generation == 2
    assert again.region_id > region.region_id


@pytest.mark.parametrize("k", range(4))
def test_one_bad_buffer_leaves_none_registered(make, k):
    agent, backend = make()
    buffers = {f"kv.{i}": bytearray(8) for i in range(4)}
    buffers[f"kv.{k}"] = bytearray()
    with pytest.raises(RegistrationError):
        agent.register_many(buffers)
    assert backend.regions == {}
    buffers[f"kv.{k}"] = bytearray(8)
    assert list(agent.register_many(buffers)) == list(buffers)


def test_failing_backend_leaves_nothing(make):
    agent, backend = make()

    def register(_):
        raise RegistrationError("pinning failed")

    backend.register = register
    with pytest.raises(RegistrationError, match="pinning"):
        agent.register(bytearray(8), name="kv")
    assert agent.regions == ()
    del backend.register
    assert agent.register(bytearray(8), name="kv").generation == 1


def test_region_keeps_its_buffer_alive_until_deregistered(make):
    agent, _ = make()
    memory = np.zeros(64, np.uint8)
    alive = weakref.ref(memory)
    region = agent.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    agent.deregister(region)
    gc.collect()
    assert alive() is None


def test_registered_bytearray_cannot_be_resized(make):
    agent, _ = make()
    buffer = bytearray(8)
    with agent.register(buffer), pytest.raises(BufferError):
        buffer.extend(b"x")
    buffer.extend(b"x")


def test_context_manager(make):
    agent, backend = make()
    with agent.register(bytearray(8)) as region:
        assert region.registered
    assert not region.registered
    assert backend.regions == {}


def test_options_are_checked():
    with pytest.raises(ConfigError, match="no option 'drain'; did you mean 'drain_s'"):
        Agent(Loopback(), name="x", options={"drain": 1})
    with pytest.raises(ConfigError, match="deadline_s"):
        Agent(Loopback(), name="x", options={"deadline_s": float("nan")})
    with pytest.raises(ConfigError, match="name"):
        Agent(Loopback(), name="")
