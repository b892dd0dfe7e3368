"""Command lines, environments and connector configurations of engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtransport_vllm.launch import EnginePair, EngineSpec, PairSpec
from kvtransport_vllm.launch.cache import cached


def spec(**fields) -> EngineSpec:
    return EngineSpec(model=Path("/model"), port=8000, log=Path("log"), **fields)


def option(command, name):
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("cores", "ranks", "binding", "threads"),
    [
        ((0,), 1, "0", "1"),
        ((0, 1), 1, "0,1", "2"),
        ((0, 1), 2, "0|1", "1"),
        ((3,), 2, "3|3", "1"),
        ((0, 1, 2, 3), 2, "0,2|1,3", "2"),
    ],
)
def test_every_rank_gets_its_own_cores(cores, ranks, binding, threads):
    env = spec(cores=cores, tensor_parallel=ranks).environment()
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == binding
    assert env["OMP_NUM_THREADS"] == threads


def test_the_callers_environment_wins():
    env = spec(env={"VLLM_LOGGING_LEVEL": "DEBUG"}).environment()
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_a_pair_names_each_other_as_peers(tmp_path):
    pair = EnginePair(PairSpec(model=Path("/model"), logs=tmp_path, options={"retention": "off"}))
    configs = [
        json.loads(option(engine.spec.command(), "--kv-transfer-config")) for engine in pair.engines
    ]
    extras = [config["kv_connector_extra_config"] for config in configs]
    assert extras[0]["peers"] == {"decode": extras[1]["listen"]}
    assert extras[1]["peers"] == {"prefill": extras[0]["listen"]}
    assert {extra["retention"] for extra in extras} == {"off"}
    assert {config["kv_role"] for config in configs} == {"kv_both"}


def test_fields_of_one_side_replace_common_ones(tmp_path):
    pair = EnginePair(
        PairSpec(
            model=Path("/model"),
            logs=tmp_path,
            common={"max_model_len": 1024},
            prefill={"prefix_caching": False, "max_model_len": 2048},
            connector=False,
        )
    )
    commands = [engine.spec.command() for engine in pair.engines]
    assert [option(command, "--max-model-len") for command in commands] == ["2048", "1024"]
    assert "--no-enable-prefix-caching" in commands[0]
    assert "--enable-prefix-caching" in commands[1]
    assert not any("--kv-transfer-config" in command for command in commands)


def test_connector_options_of_one_side_replace_common_ones(tmp_path):
    pair = EnginePair(
        PairSpec(
            model=Path("/model"),
            logs=tmp_path,
            options={"recompute": "threshold", "retention": "ttl"},
            prefill_options={"recompute": "never_pull"},
            decode_options={"kv_recompute_threshold": 7},
        )
    )
    prefill, decode = (
        json.loads(option(engine.spec.command(), "--kv-transfer-config"))[
            "kv_connector_extra_config"
        ]
        for engine in pair.engines
    )
    assert (prefill["recompute"], decode["recompute"]) == ("never_pull", "threshold")
    assert (prefill["retention"], decode["retention"]) == ("ttl", "ttl")
    assert "kv_recompute_threshold" not in prefill
    assert decode["kv_recompute_threshold"] == 7


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached("model", fail, cache=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [".model.lock"]
    folder = cached("model", lambda part: (part / "whole").touch() or None, cache=tmp_path)
    assert [each.name for each in folder.iterdir()] == ["whole"]
    cached("model", fail, cache=tmp_path)  # already there: not built again
