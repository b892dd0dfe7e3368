from __future__ import annotations

from pathlib import Path

import pytest

from kvtransport.errors import ConfigError
from kvtransport_conformance import diff, matrix
from kvtransport_conformance.report import write

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def stored(host_report):
    """The table that variants of a real report give."""

    def table(*edits):
        reports = []
        for edit in edits:
            reports.append({**host_report})
            edit(reports[-1])
        return matrix.table(reports)

    return table


def _success(report):
    report["profiles"] = {
        name: {"result": "success", "core": [1, 0, 0], "extended": [0, 0, 0]}
        for name in matrix.COLUMNS
    }


def _real(kind):
    def edit(report):
        _success(report)
        report["backend"] = {**report["backend"], "name": kind}
        report["environment"] = {
            **report["environment"], "tier": "E3", "devices": [{"kind": kind, "name": "x"}],
        }  # fmt: skip

    return edit


def test_a_tier_that_was_not_reached_says_so_in_words(stored):
    text = stored(_success)
    assert "✔ E2 (loopback) 2026.1" in text
    assert "not verified on real hardware" in text
    assert "*designed to be* accelerator-agnostic" in text
    assert "has 0" in text


def test_no_cell_is_blank(stored):
    rows = [line for line in stored(_success).splitlines() if line.startswith("| `")]
    assert rows
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_the_claim_is_computed(stored):
    assert "has 1" in stored(_real("cuda"))
    text = stored(_real("cuda"), _real("neuron"))
    assert "is accelerator-agnostic: verified on cuda, neuron" in text


def test_emulated_never_counts_as_hardware(stored):
    def emulated(report):
        _success(report)
        report["environment"] = {**report["environment"], "tier": "E1", "emulated": True}

    text = stored(emulated)
    assert "✔ E1 (emulated)" in text
    assert "emulated, not verified on real hardware" in text


def test_unfinished_and_old_reports_are_left_out(stored):
    def unfinished(report):
        report["complete"] = False

    def old(report):
        report["suite"] = {**report["suite"], "version": "2024.1"}

    assert "| `host`" not in stored(unfinished, old)


def test_an_edited_report_stays_out_of_the_table(host_report, tmp_path):
    report = {**host_report}
    _success(report)
    write(tmp_path / "edited.json", report)
    with pytest.raises(ConfigError, match=r"edited\.json cannot be in the table"):
        matrix.render([tmp_path / "edited.json"])
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no report"):
        matrix.render([tmp_path / "none.json"])
    write(tmp_path / "sound.json", host_report)
    assert "| `host`" in matrix.render([tmp_path / "sound.json"])


def test_replacing_is_exact_and_idempotent():
    text = f"# Title\n\n{matrix.BEGIN}\nold\n{matrix.END}\n\nrest\n"
    new = matrix.replace_in(text, "| table |\n")
    assert new == f"# Title\n\n{matrix.BEGIN}\n| table |\n{matrix.END}\n\nrest\n"
    assert matrix.replace_in(new, "| table |\n") == new
    with pytest.raises(ConfigError, match="needs one line"):
        matrix.replace_in("no markers", "x")


def test_readme_holds_the_table_of_the_stored_reports():
    root = Path(__file__).parents[2]
    table = matrix.render(matrix.find_reports([root / "conformance" / "reports"]))
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert matrix.replace_in(readme, table) == readme


def test_diff_tells_regressions_from_new_meanings(host_report):
    import copy

    after = copy.deepcopy(host_report)
    after["checks"]["REG-01"]["status"] = "FAIL"
    after["checks"]["REG-02"].update(status="FAIL", revision=2)
    after["checks"]["MD-01"]["teardown"] = "LEAK"
    after["checks"]["RD-02"]["status"] = "NOT_RUN"
    del after["checks"]["DSC-01"]
    found = {change.check: change.verdict for change in diff.compare(host_report, after)}
    assert found == {
        "REG-01": "regressed", "REG-02": "revision changed", "MD-01": "regressed",
        "DSC-01": "regressed", "RD-02": "regressed",
    }  # fmt: skip
    back = {change.check: change.verdict for change in diff.compare(after, host_report)}
    assert back["REG-01"] == "fixed"
    assert back["DSC-01"] == "added"
    assert diff.compare(host_report, host_report) == []
