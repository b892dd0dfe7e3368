"""What ``kvt calibrate`` concludes from samples; tests/engines has those of a real pair."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvtransport.errors import KVTransportError
from kvtransport.policy.cost_model import CostModel
from kvtransport.policy.rates import PullRates
from kvtransport_vllm.calibrate import Calibration, Point, Pull, lengths, samples_per_round, why_not

TOKEN_NBYTES = 8192
FIXED_S, BYTE_S = 0.001, 1 / 4e9
STEP_S, TOKEN_S, PAIR_S = 0.02, 2e-4, 1e-7


def point(tokens, pulls=6, *, descriptors=8, stall=1.0) -> Point:
    """Samples that obey the rates above; one in the middle is ``stall`` times as slow."""
    nbytes = tokens * TOKEN_NBYTES
    seconds = FIXED_S + BYTE_S * nbytes
    made = Point(tokens, compute_s=[STEP_S + TOKEN_S * tokens + PAIR_S * tokens**2 / 2] * 6)
    for number in range(pulls):
        slow = stall if number == 2 else 1.0
        made.pulls.append(Pull(0.02, slow * seconds, descriptors, nbytes))
    return made


def points(**fields) -> list[Point]:
    return [point(tokens, **fields) for tokens in (128, 512, 2048, 4096)]


@pytest.mark.parametrize("stall", [1.0, 50.0])
def test_rates_of_the_samples_are_found_and_predict_them(stall):
    measured = points(stall=stall)
    found = Calibration.of(measured)
    assert found.pull.byte_s == pytest.approx(BYTE_S, rel=0.05)
    assert found.compute.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert found.compute.pair_s == pytest.approx(PAIR_S, rel=0.05)
    for one in measured:
        assert found.predict(one) == pytest.approx(one.measured_s, rel=0.05)
    assert found.token_nbytes == TOKEN_NBYTES


def test_the_break_even_is_where_computing_becomes_dearer():
    found = Calibration.of(points())
    even = found.break_even
    assert even is not None

    def pulled(tokens):
        return found.pull.seconds(nbytes=TOKEN_NBYTES * tokens, descriptors=8) + STEP_S

    assert pulled(2 * even) < found.compute.seconds(2 * even)
    assert pulled(even // 2) > found.compute.seconds(even // 2)


def test_a_network_slower_than_computing_has_no_break_even():
    measured = points()
    for one in measured:
        one.pulls = [Pull(0.02, 1e-4 * p.nbytes, p.descriptors, p.nbytes) for p in one.pulls]
    assert Calibration.of(measured).break_even is None


@pytest.mark.parametrize("pulls", [0, 1])
def test_a_length_that_was_not_pulled_twice_is_left_out(pulls):
    short = point(64, pulls)
    short.not_pulled["policy"] = 6 - pulls
    measured = [short, *points()]
    report = Calibration.of(measured).report(measured)
    assert [row["tokens"] for row in report["points"]] == [128, 512, 2048, 4096]
    assert report["skipped"] == [
        {"tokens": 64, "pulls": pulls, "not_pulled": {"policy": 6 - pulls}}
    ]
    assert why_not(short) == f"{6 - pulls} not pulled (policy {6 - pulls})"


@pytest.mark.parametrize("pulls", [0, 1])
def test_without_two_pulls_of_any_length_the_reasons_are_told(pulls):
    measured = points(pulls=pulls)
    for one in measured:
        one.not_pulled["no_holding"] = 5
    with pytest.raises(KVTransportError, match=r"4096 tokens: 5 not pulled \(no_holding 5\)"):
        Calibration.of(measured)


def test_one_length_alone_still_predicts_itself():
    measured = [point(256)]
    found = Calibration.of(measured)
    assert found.predict(measured[0]) == pytest.approx(measured[0].measured_s, rel=0.05)


def test_the_report_is_json_and_names_the_worst_prediction():
    measured = points()
    # No straight line goes through times of which one in the middle is threefold.
    measured[1].pulls = [
        Pull(p.leg_s, 3 * p.pull_s, p.descriptors, p.nbytes) for p in measured[1].pulls
    ]
    report = json.loads(json.dumps(Calibration.of(measured).report(measured)))
    ratios = [row["ratio"] for row in report["points"]]
    assert report["worst_ratio"] == ratios[1] < 0.7
    row = report["points"][1]
    assert row["ratio"] == pytest.approx(row["predicted_s"] / row["measured_s"])
    assert row["quartiles_s"] == pytest.approx([row["measured_s"]] * 2)
    assert (row["tokens"], row["descriptors"], row["bytes"]) == (512, 8, 512 * TOKEN_NBYTES)


def test_the_held_out_ratio_is_of_pulls_that_were_not_fitted_to():
    measured = points()
    # Every second pull is slower, three times for one length.
    for number, one in enumerate(measured):
        times = 3 if number == 1 else 2
        one.pulls[1::2] = [
            Pull(p.leg_s, times * p.pull_s, p.descriptors, p.nbytes) for p in one.pulls[1::2]
        ]
    report = Calibration.of(measured).report(measured)
    assert report["worst_held_out_ratio"] == pytest.approx(1 / 3, rel=0.05)
    assert not 0.6 < report["points"][0]["held_out_ratio"] < 1.6
    assert all(0.7 < row["ratio"] < 1.4 for row in report["points"])


def test_the_printed_configuration_starts_the_cost_model():
    found = Calibration.of(points())
    model = CostModel(found.config())
    assert model.compute_seconds(1000) == pytest.approx(found.compute.seconds(1000), rel=0.01)


def test_bytes_that_cost_nothing_are_not_taken_for_unknown():
    rates = PullRates(fixed_s=1e-3, descriptor_s=1e-4, byte_s=0.0)
    found = replace(Calibration.of(points()), pull=rates)
    used = CostModel(found.config()).options.pull_rates()
    assert used.usable
    assert used.seconds(nbytes=1e9, descriptors=100) == pytest.approx(0.011, rel=0.01)


def test_no_prompt_is_longer_than_the_engines_take():
    assert lengths(4096) == [128, 256, 512, 1024, 2048, 4096]
    assert lengths(700) == [128, 256, 512, 700]
    assert lengths(100) == [100]


def test_short_prompts_are_measured_more_often():
    assert [samples_per_round(tokens) for tokens in (100, 256, 512, 1024, 4096)] == [2, 2, 2, 1, 1]
