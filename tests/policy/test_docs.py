"""What docs/policies.md says is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtransport.config import options_of
from kvtransport.policy.budgeted import ValueOptions
from kvtransport.policy.cost_model import CostOptions
from kvtransport.policy.rates import ComputeRates, PullRates, break_even_tokens
from kvtransport.policy.recompute import PullQuestion, load_recompute
from kvtransport.policy.retention import load_retention
from kvtransport_vllm import config as adapter_config

TEXT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
PULL = PullRates(fixed_s=0.015, descriptor_s=3e-6, byte_s=1 / 20e9)
COMPUTE = ComputeRates(step_s=0.008, token_s=6e-5, pair_s=1.5e-9)
TOKEN_NBYTES = 131072


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table whose header starts like this."""
    table = TEXT[TEXT.index(f"| {heading}") :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_configurations_load(tmp_path: Path) -> None:
    found = blocks("json")
    assert len(found) >= 2
    for text in found:
        config = json.loads(text)
        adapter_config.load(config)
        load_retention(config["retention"], config["retention_config"])
        if "recompute" in config:
            options = {**config["recompute_config"], "state_file": str(tmp_path / "state")}
            load_recompute(config["recompute"], options)


@pytest.mark.parametrize("kind", [ValueOptions, CostOptions])
def test_every_setting_is_described_with_its_default(kind: type) -> None:
    described = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            names = re.findall(r"`(\w+)`", cells[0])
            defaults = re.findall(r'[\d.]+|\{\}|""', cells[1])
            described.update(zip(names, defaults * len(names), strict=False))
            if len(names) == len(defaults):
                described.update(zip(names, defaults, strict=True))
    for name, option in options_of(kind).items():
        if name == "state_identity":
            continue  # set by the adapter, not by people
        expected = json.dumps(option.default)
        shown = described[name]
        same = shown == expected or float(shown) == float(option.default)
        assert same, f"{name}: {shown} in the text, {expected} in the code"


def test_bytes_per_token() -> None:
    for model, shape, per_token, total in rows("model |"):
        numbers = [int(number) for number in re.findall(r"\d+", shape)]
        factor = 1 if "latent" in shape else 2
        first, second, third = numbers
        elements = first * (second + third) if factor == 1 else 2 * first * second * third
        nbytes = elements * 2
        assert float(per_token.split()[0]) == pytest.approx(nbytes / 2**10, abs=0.06), model
        assert float(total.split()[0]) == pytest.approx(nbytes * 1e4 / 2**30, abs=0.006), model


def test_worked_example_of_the_budget() -> None:
    assert "66 GiB" in TEXT
    assert pytest.approx(66, abs=0.5) == 90 * 6000 * TOKEN_NBYTES / 2**30
    assert "about 27 of them" in TEXT
    assert int(20 * 2**30 / (6000 * TOKEN_NBYTES)) == 27


def test_worked_example_of_the_cost_model() -> None:
    policy = load_recompute(
        "cost_model",
        {
            "pull_fixed_s": 0.015,
            "pull_descriptor_s": 3e-6,
            "pull_bytes_per_s": 20e9,
            "compute_step_s": 0.008,
            "compute_token_s": 6e-5,
            "compute_pair_s": 1.5e-9,
            "explore_after_s": 0,
        },
    )
    for cells in rows("tokens beyond the local hit | pull"):
        tokens = int(cells[0].replace(",", ""))
        decision = policy.decide(
            PullQuestion(
                tokens_beyond_local=tokens, nbytes=tokens * TOKEN_NBYTES, descriptors=tokens // 16
            )
        )
        pull_ms, compute_ms = (float(cell.split()[0].replace(",", "")) for cell in cells[1:3])
        assert decision.predicted_pull_s * 1e3 == pytest.approx(pull_ms, rel=0.01)
        assert decision.predicted_compute_s * 1e3 == pytest.approx(compute_ms, rel=0.01)
        assert decision.pull == cells[3].startswith("pulls"), tokens


def test_break_even_of_the_example() -> None:
    slow = PullRates(fixed_s=0.015, descriptor_s=3e-6, byte_s=1 / 2e9)
    for pull, per_token, text in (
        (PULL, 1 / 16, "break-even is at 281"),
        (PULL, 4, "4 descriptors per token it is 360"),
        (slow, 1 / 16, "2 GB/s it is 8,704"),
    ):
        tokens = break_even_tokens(
            pull, COMPUTE, token_nbytes=TOKEN_NBYTES, descriptors_per_token=per_token
        )
        assert text in TEXT
        assert str(tokens) in text.replace(",", "")


def test_the_example_policy_runs() -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)  # our own documentation
    policy = names["NightlyPulls"]({"least": 10})
    assert policy.decide(PullQuestion(tokens_beyond_local=10)).pull
