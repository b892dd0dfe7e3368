"""The demo's verdict can be false, its page says so, and its edit is one."""

from __future__ import annotations

from dataclasses import replace

import page
import pytest
from chat import Answer
from conversation import EDITED, TURNS, edited, system_prompt
from run import Result, common_prefix
from verdict import findings


def answer(ttft_s: float, *, pulled: int = 0, text: str = "yes") -> Answer:
    counts = {"prompt_tokens": 1000, "local_tokens": 0, "pulled_tokens": pulled}
    return Answer(text, ttft_s, ttft_s + 1, {**counts, "recomputed_tokens": 1000 - pulled})


def good() -> list[Result]:
    return [
        Result(turn, answer(3.0), answer(1.0, pulled=900 if number else 0), unchanged_tokens=950)
        for number, turn in enumerate(TURNS)
    ]


def failed(results: list[Result]) -> list[str]:
    return [each.text for each in findings(results) if each.required and not each.holds]


def test_a_good_run_fails_nothing():
    assert failed(good()) == []
    assert all(each.holds for each in findings(good()))


def test_a_different_answer_is_named_with_its_turn():
    results = good()
    results[2] = replace(results[2], on=answer(1.0, pulled=900, text="no"))
    assert failed(results) == ["DIFFERENT ANSWERS in turn 3"]


def test_a_turn_that_pulled_nothing_is_found():
    results = good()
    results[3] = replace(results[3], on=answer(1.0))
    assert len(failed(results)) == 1


@pytest.mark.parametrize("pulled", [0, 951])
def test_more_than_the_common_prefix_or_nothing_after_the_edit_is_found(pulled):
    results = good()
    results[4] = replace(results[4], on=answer(1.0, pulled=pulled))
    assert len(failed(results)) == 1


def test_a_slow_run_is_told_but_required_of_nobody():
    results = [replace(each, off=answer(1.0)) for each in good()]
    assert failed(results) == []
    assert not all(each.holds for each in findings(results))


@pytest.mark.parametrize("text", ["yes", "<script>no</script>"])
def test_the_page_shows_what_was_found_and_loads_nothing(text):
    results = good()
    results[2] = replace(results[2], on=answer(1.0, pulled=900, text=text))
    setting = page.Setting("host", "model", prefix_caching=False)
    made = page.render(results, findings(results), setting, {"prefill": {}, "decode": {}})
    assert ("DIFFERENT ANSWERS" in made) == (text != "yes")
    assert "<script" not in made
    assert "http" not in made
    assert made.count("<rect") == 2 * len(TURNS) + sum(2 if number else 1 for number in range(5))


def test_the_edit_changes_one_question_and_leaves_the_original_alone():
    history = [{"role": "system", "content": system_prompt()}]
    for turn in TURNS[:4]:
        history.append({"role": "user", "content": turn.question})
        history.append({"role": "assistant", "content": "answer"})
    changed = edited(history)
    different = [at for at, (a, b) in enumerate(zip(history, changed, strict=True)) if a != b]
    assert different == [1 + 2 * EDITED]
    assert changed[different[0]]["role"] == "user"


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0)],
)
def test_common_prefix(left, right, expected):
    assert common_prefix(left, right) == common_prefix(right, left) == expected
