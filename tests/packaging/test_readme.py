"""What the README tells people to type works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransport_vllm.config import load
from kvtransport_vllm.launch.pair import connector_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONFIGS = re.findall(r"--kv-transfer-config '(\{.*?\})'", README, re.DOTALL)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_example_runs_and_moves_64_blocks():
    (example,) = (each for each in blocks("python") if "Agent.open" in each)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], check=True, stdout=subprocess.PIPE
    )
    assert done.stdout == b"4194304 bytes in 1 descriptor\n"
    assert len([line for line in example.splitlines() if line]) <= 20


@pytest.mark.parametrize("text", CONFIGS)
def test_the_connector_configurations_are_valid(text):
    config = json.loads(text)
    load(config.pop("kv_connector_extra_config"))
    expected = connector_config(listen=1, peers={})
    del expected["kv_connector_extra_config"]
    assert config == expected


def test_the_pair_in_the_readme_knows_each_other():
    prefill, decode = (json.loads(text)["kv_connector_extra_config"] for text in CONFIGS)
    assert prefill["peers"] == {"decode": decode["listen"]}
    assert decode["peers"] == {"prefill": prefill["listen"]}


def test_every_relative_link_leads_somewhere():
    targets = re.findall(r"\]\(((?!https?:)[^)#]+)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []
