"""A decode engine in its own process is killed, frozen and restarted; P goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.sim import Sim, reference
from support.sim_process import RemoteSim
from support.turns import tokens

from kvtransport_vllm import outcomes
from kvtransport_vllm.launch import free_ports

pytestmark = pytest.mark.timeout(180)


class Fixture:
    """P here, D in a process; ``history`` is retained on D and forgotten by P."""

    def __init__(self, path: str) -> None:
        ports = free_ports(2)
        self.addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        common: dict[str, Any] = {
            "backend_config": {"path": path},
            "blocks": 400,
            "lookup_timeout_s": 1.0,
            "transfer_timeout_s": 3.0,
            "drain_timeout_s": 1.0,
        }
        self.d_arguments = {"listen": self.addresses[1], "peers": [self.addresses[0]], **common}
        self.p = Sim("p", listen=self.addresses[0], peers=[self.addresses[1]], **common)
        self.d = RemoteSim(**self.d_arguments)
        self.serial = 0

    def connect(self, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while not self.p.side._engine.control.engines():
            assert time.monotonic() < end, "P did not find D"
            time.sleep(0.02)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        self.serial += 1
        name = f"p{self.serial}"
        self.p.add(name, prompt, params={"do_remote_decode": True})
        assert self.p.finish(name) == reference(prompt, 1)
        self.p.run()
        params: dict[str, Any] = self.p.params[name]
        return params

    def turn(self, prompt: list[int], max_tokens: int = 8) -> tuple[list[int], dict[str, Any]]:
        params = self.prefill(prompt)
        answer = self.d.complete(f"d{self.serial}", prompt, max_tokens=max_tokens, params=params)
        return answer, params["kvt_turn"]

    def restart(self) -> None:
        self.d.kill()
        self.d = RemoteSim(**self.d_arguments)
        self.connect()

    def close(self) -> None:
        self.d.kill()
        self.p.close()


@pytest.fixture(scope="module", params=["vm", "tcp"])
def engines(request: pytest.FixtureRequest) -> Iterator[Fixture]:
    made = Fixture(request.param)
    made.connect()
    yield made
    made.close()


def first_turn(engines: Fixture) -> list[int]:
    engines.connect()
    prompt = tokens(1500, seed=100 + engines.serial)
    answer, _ = engines.turn(prompt, max_tokens=16)
    assert answer == reference(prompt, 16)
    engines.p.empty()
    return prompt + answer + tokens(20, seed=1)


def at_the_first_pull(engines: Fixture, act: Any) -> None:
    """Call ``act`` right after P has posted its next read."""
    assert engines.p.worker is not None
    start = engines.p.worker.start

    def start_and_act(meta: Any) -> None:
        start(meta)
        if meta.pulls:
            engines.p.worker.start = start  # type: ignore[method-assign,union-attr]
            act()

    engines.p.worker.start = start_and_act  # type: ignore[method-assign]


def test_killed_before_the_pull_then_restarted(engines: Fixture) -> None:
    prompt = first_turn(engines)
    engines.d.signal(signal.SIGKILL)
    turn = engines.prefill(prompt)["kvt_turn"]
    assert turn["pulled_tokens"] == 0
    assert turn["outcome"] in {outcomes.NO_PEER, outcomes.LOOKUP_TIMEOUT, outcomes.NO_HOLDING}
    engines.restart()
    answer, turn = engines.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["pulled_tokens"] == 0  # the new D retains nothing of the old one's life
    engines.p.empty()
    prompt = prompt + answer + tokens(5, seed=2)
    answer, turn = engines.turn(prompt)
    assert answer == reference(prompt, 8)
    assert turn["pulled_tokens"] > 1500


def test_killed_during_the_pull(engines: Fixture) -> None:
    prompt = first_turn(engines)
    at_the_first_pull(engines, lambda: engines.d.signal(signal.SIGKILL))
    turn = engines.prefill(prompt)["kvt_turn"]
    assert turn["outcome"] in {
        outcomes.PULLED,  # every byte had come before the end
        outcomes.PEER_LOST,
        outcomes.TRANSPORT,
        outcomes.TRANSFER_TIMEOUT,
        outcomes.LEASE_EXPIRED,
    }
    engines.restart()
    answer, _ = engines.turn(prompt)
    assert answer == reference(prompt, 8)


def test_frozen_during_the_pull_is_bounded(engines: Fixture) -> None:
    prompt = first_turn(engines)
    at_the_first_pull(engines, lambda: engines.d.signal(signal.SIGSTOP))
    began = time.monotonic()
    engines.prefill(prompt)
    assert time.monotonic() - began < 20
    engines.d.signal(signal.SIGCONT)
    engines.connect()
    answer, _ = engines.turn(prompt)
    assert answer == reference(prompt, 8)


def test_frozen_before_the_lookup_is_bounded(engines: Fixture) -> None:
    prompt = first_turn(engines)
    engines.d.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert engines.prefill(prompt)["kvt_turn"]["outcome"] in {
        outcomes.LOOKUP_TIMEOUT,
        outcomes.NO_PEER,
    }
    assert time.monotonic() - began < 20
    engines.d.signal(signal.SIGCONT)
