"""``kvt calibrate`` against a real pair."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from kvtransport_vllm.calibrate import app

_HANDOFFS = {"purpose": "handoff"}


def test_a_pair_is_measured_and_left_as_it_was(pair):
    before = pair.prefill.counter("kvtransport_holdings_added_total", **_HANDOFFS)
    addresses = [f"http://127.0.0.1:{engine.port}" for engine in pair.engines]
    result = CliRunner().invoke(
        app,
        ["--prefill", addresses[0], "--decode", addresses[1], "--longest", "1000", "--rounds", "2",
         "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["tokens"] for row in report["points"]] == [128, 256, 512, 1000]
    assert report["skipped"] == []
    assert report["break_even_tokens"] is None or report["break_even_tokens"] > 0
    assert [row["pulls"] for row in report["points"]] == [4, 4, 4, 4]
    for row in report["points"]:
        assert row["predicted_s"] > 0
        assert row["bytes"] > 0
    # Every prompt that was handed over has been fetched, or the cache would be full of them.
    added = pair.prefill.counter("kvtransport_holdings_added_total", **_HANDOFFS) - before
    assert added == 4 + 4 * 4  # four to warm up
    pair.prefill.await_counter(
        "kvtransport_holdings_dropped_total", added, purpose="handoff", reason="delivered"
    )
