"""What the benchmark of the policies sets up, and what it concludes from samples."""

from __future__ import annotations

import http.client
import json
import math
import threading
from types import SimpleNamespace

import pytest
from bench_policies import Combination
from policy_load import Load, Run, Turn, converse, scrape
from policy_report import (
    Row,
    compare_counts,
    judge,
    policy_verdicts,
    pressure_verdicts,
    quantile,
    ratio,
    show,
    turn_by_turn,
    write,
)
from rich.console import Console

from kvtransport_vllm.launch.http import HttpStatusError


def run(name, repeat, times, *, tpot=0.01) -> Run:
    turns = [Turn(seed, 0, ttft, tpot, 8, 100, "pulled") for seed, ttft in enumerate(times)]
    return Run(name, repeat, turns, seconds=1.0, retained=[2.0**20], preemptions=0.0)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1], 50, 1),
        ([2, 1], 50, 1),
        ([3, 1, 2], 50, 2),
        (range(1, 101), 95, 95),
        (range(1, 101), 99, 99),
        (range(1, 21), 95, 19),
        ([1, 2], 0, 1),
        ([1, 2], 100, 2),
    ],
)
def test_nearest_rank(values, percent, expected):
    assert quantile(list(values), percent) == expected


def test_no_samples_have_no_quantile():
    assert math.isnan(quantile([], 50))


def test_each_engine_of_each_row_has_its_own_calibration_file(tmp_path):
    row = Combination("cost_model", "ttl")
    stale = tmp_path / "calibration-decode.json"
    stale.write_text("{}")
    files = [row.options(role, tmp_path)["recompute_config"] for role in ("prefill", "decode")]
    assert files[0] != files[1]
    assert not stale.exists()


def test_without_reuse_the_decode_engine_still_takes_the_prompt(tmp_path):
    row = Combination("never_pull", "off")
    assert row.options("prefill", tmp_path)["recompute"] == "never_pull"
    assert row.options("decode", tmp_path)["recompute"] == "always_pull"


def test_a_ratio_is_to_the_best_of_the_others():
    mine = Row("mine", [run("mine", r, [0.2] * 10) for r in range(2)])
    others = [
        Row("slow", [run("slow", r, [0.4] * 10) for r in range(2)]),
        Row("fast", [run("fast", r, [0.1] * 10) for r in range(2)]),
    ]
    found = ratio(mine, others, 50, lambda turn: turn.ttft_s, "it")
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    assert judge(found) == "WORSE"


def test_a_difference_within_the_spread_is_no_verdict():
    """Every second repeat is twice as slow, in either row another one."""
    mine = Row("mine", [run("mine", r, [0.2 if r else 0.1] * 9) for r in range(2)])
    other = Row("other", [run("other", r, [0.099 if r else 0.198] * 9) for r in range(2)])
    found = ratio(mine, [other], 95, lambda turn: turn.ttft_s, "it")
    assert found.value > 1
    assert found.low < 1 < found.high
    assert judge(found) == "no worse within noise"


def test_rows_without_samples_make_no_verdict_and_no_crash(tmp_path):
    rows = [
        Row("threshold 64 budgeted", [Run("threshold 64 budgeted")]),
        Row("cost_model budgeted"),
    ]
    assert policy_verdicts(rows) == []
    console = Console(width=80, record=True)
    show(rows, [], console)
    assert "threshold 64 budgeted" in console.export_text()
    write(rows, [], tmp_path / "page", "no conditions")
    saved = json.loads((tmp_path / "page.json").read_text())
    assert saved["rows"][0]["ttft_p50_s"] is None


def test_the_table_fits_80_columns_with_whole_names():
    name = "threshold 2048 budgeted"
    rows = [Row(name, [run(name, r, [1.234] * 10) for r in range(2)])]
    console = Console(width=80, record=True)
    show(rows, [], console)
    text = console.export_text()
    assert name in text
    assert "…" not in text
    assert "1234" in text


def test_the_same_turns_are_compared_one_by_one():
    """Prompts of very different lengths: the quantiles lie among others than the ratio."""
    names = ("cost_model budgeted", "threshold 0 budgeted", "threshold 64 budgeted")
    times = ([0.11, 1.1, 11.0], [0.1, 1.0, 10.0], [11.0, 0.2, 2.0])
    rows = [Row(name, [run(name, 0, one)]) for name, one in zip(names, times, strict=True)]
    assert turn_by_turn(rows[0], rows[1]) == pytest.approx(1.1)
    assert turn_by_turn(rows[0], rows[2]) == pytest.approx(5.5)
    assert math.isnan(turn_by_turn(rows[0], Row("empty")))
    last = policy_verdicts(rows)[-1]
    assert "cost_model / threshold 64 budgeted = 5.50" in last


def test_preemptions_are_compared_as_counts():
    assert compare_counts(0, 0) == "equal"
    assert compare_counts(12, 9) == "equal within noise"
    assert compare_counts(30, 9) == "NOT EQUAL"


LOAD = Load(conversations=1, turns=2, system=80, question=4, answer=2, think_s=1e-6, concurrency=1)


def engine(answer):
    def complete(*_args, **_fields):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(complete=complete, port=0, counter=complete)


@pytest.mark.parametrize(
    ("answer", "refused", "failed"),
    [
        (HttpStatusError("/v1/completions", 400, "no"), 1, 0),
        (ConnectionResetError(), 0, 1),
        (http.client.IncompleteRead(b""), 0, 1),
        (ValueError("no JSON"), 0, 1),
        ({}, 0, 1),
    ],
)
def test_a_broken_turn_is_counted_and_ends_its_conversation_only(answer, refused, failed):
    broken = Run("broken")
    converse(SimpleNamespace(prefill=engine(answer)), LOAD, 0, broken, threading.Lock())
    assert (broken.refused, broken.failed, len(broken.errors)) == (refused, failed, 1)
    assert not broken.turns


def test_a_metric_that_cannot_be_read_is_none():
    assert scrape(engine(TimeoutError()), "kvtransport_retained_bytes") is None


def test_retention_under_pressure_is_compared_with_none():
    off = Row("threshold 64 off", [run("threshold 64 off", r, [0.2] * 5) for r in range(2)])
    slow = [run("threshold 64 ttl", r, [0.2] * 5, tpot=0.02) for r in range(2)]
    slow[0].preemptions, slow[1].refused = 30.0, 1
    counts, tpot = pressure_verdicts([off, Row("threshold 64 ttl", slow)])
    assert "preemptions 30 and 0 (NOT EQUAL)" in counts
    assert "refused 1 and 0, failed 0 and 0 (NOT EQUAL)" in counts
    assert tpot.endswith("= 2.00 (90 %: 2.00 to 2.00): HIGHER")
    same = Row("threshold 64 ttl", [run("threshold 64 ttl", r, [0.9] * 5) for r in range(2)])
    counts, tpot = pressure_verdicts([off, same])
    assert "NOT" not in counts
    assert tpot.endswith("equal within noise")
