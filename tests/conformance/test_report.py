from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from kvtransport_conformance import verify
from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.render import write_all
from kvtransport_conformance.render.html import to_html
from kvtransport_conformance.render.junit import to_junit
from kvtransport_conformance.render.markdown import to_markdown
from kvtransport_conformance.report import content_digest, dumps, load, profiles_of

pytestmark = pytest.mark.timeout(120)


def reseal(report):
    """What somebody does who knows about the digest."""
    report["content_digest"] = content_digest(report)
    return report


def test_a_real_report_is_sound(host_report):
    assert verify.problems(host_report) == []
    assert verify.notes(host_report) == []
    statuses = {key: entry["status"] for key, entry in host_report["checks"].items()}
    assert statuses.pop("SEC-02") == "NOT_SUPPORTED"
    assert set(statuses.values()) == {"PASS"}
    assert host_report["environment"]["tier"] == "E2"
    assert host_report["backend"]["dist"] == "kvtransport"


def test_a_part_of_the_checks_is_never_a_success(host_report):
    assert host_report["profiles"]["KVT-BASE"]["result"] == "partial"
    assert "NOT_RUN" in host_report["profiles"]["KVT-BASE"]["reason"]
    assert host_report["result"] == "partial"


def test_json_survives_the_file(host_report, tmp_path):
    files = write_all(tmp_path / "new" / "folder", host_report)
    assert sorted(path.name for path in files) == [
        "report.html", "report.json", "report.md", "report.xml",
    ]  # fmt: skip
    again = load(tmp_path / "new" / "folder" / "report.json")
    assert again == host_report
    assert dumps(again) == dumps(host_report)
    assert verify.problems(again) == []


def _turn_green(report):
    report["checks"]["SEC-02"]["status"] = "PASS"


def _better_profile(report):
    report["profiles"]["KVT-BASE"]["result"] = "success"


def _better_result(report):
    report["result"] = "success"


def _other_tier(report):
    report["environment"]["tier"] = "E4"


def _drop_check(report):
    del report["checks"]["SEC-02"]


def _drop_check_and_count(report):
    del report["checks"]["SEC-02"]
    report["suite"]["plan"] -= 1


def _hide_excluded(report):
    report["suite"]["excluded"] = {}


def _lower_level(report):
    report["checks"]["SEC-02"]["level"] = "info"


def _lower_level_in_profile(report):
    report["checks"]["SEC-02"]["profiles"]["KVT-SECURE"] = "info"


def _older_revision(report):
    report["checks"]["REG-01"]["revision"] = 9


EDITS = [
    _turn_green, _better_profile, _better_result, _other_tier, _drop_check, _drop_check_and_count,
    _hide_excluded, _lower_level, _lower_level_in_profile, _older_revision,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_report_is_rejected(host_report, edit):
    edit(host_report)
    assert any("content_digest" in text for text in verify.problems(host_report))


@pytest.mark.parametrize("edit", [e for e in EDITS if e not in {_other_tier, _turn_green}])
def test_totals_and_plan_are_recomputed_as_well(host_report, edit):
    edit(host_report)
    assert verify.problems(reseal(host_report))


def test_a_green_check_alone_does_not_make_a_profile(host_report):
    # What verify cannot see, and the documentation says so: a resealed status.
    _turn_green(host_report)
    assert verify.problems(reseal(host_report)) != [] or (
        host_report["profiles"]["KVT-SECURE"]["result"] != "success"
    )


def test_a_device_profile_needs_every_check_of_the_device(host_report):
    host_report["environment"].update(tier="E3", devices=[{"kind": "cuda", "driver": "570"}])
    host_report["capabilities"]["memory"]["declared"] = [["cuda", "cuda"]]
    for key, known in all_checks().items():
        if "KVT-BASE" in known.profiles:
            host_report["checks"][key] = {
                "status": "PASS", "teardown": "CLEAN", "level": known.level,
                "profiles": dict(known.profiles), "revision": 1, "seconds": 0.1,
            }  # fmt: skip
    found = profiles_of(host_report)["KVT-DEVICE[cuda]"]
    assert found["result"] == "partial", found
    seen = {"status": "PASS", "teardown": "CLEAN", "level": "extended", "profiles": {}}
    for key, known in all_checks().items():
        if known.profiles.get("KVT-DEVICE") == "core":
            host_report["checks"][key] = seen
    assert profiles_of(host_report)["KVT-DEVICE[cuda]"]["result"] == "success"
    host_report["checks"]["DEV-01"] = {**seen, "status": "NOT_VERIFIED"}
    assert profiles_of(host_report)["KVT-DEVICE[cuda]"]["result"] == "partial"


def test_an_unfinished_run_is_rejected(host_report):
    host_report["complete"] = False
    assert verify.problems(reseal(host_report)) == ["the run did not finish: complete is false"]


@pytest.mark.parametrize(
    "path", ["checks.REG-01.status", "environment.tier", "suite.seed", "result", "complete"]
)
def test_the_schema_is_strict(host_report, path):
    *parents, last = path.split(".")
    place = host_report
    for parent in parents:
        place = place[parent]
    place[last] = "nonsense"
    assert verify.problems(host_report)[0].startswith(f"schema: {path}")


def test_missing_and_extra_keys_are_refused(host_report):
    host_report["remark"] = "all fine"
    del host_report["setup"]
    text = "\n".join(verify.problems(host_report))
    assert "remark" in text
    assert "setup" in text


def test_renderings_say_the_same(host_report):
    markdown, page = to_markdown(host_report), to_html(host_report)
    for text in (markdown, page):
        for words in ("not verified on real hardware", "REG-01", "partial", "2 processes, 1 host"):
            assert words in text
    suite = ET.fromstring(to_junit(host_report))
    assert suite.get("tests") == "9"
    assert suite.get("failures") == "0"
    assert suite.get("skipped") == "1"


def test_failures_come_first_and_are_escaped(host_report):
    entry = host_report["checks"]["REG-01"]
    entry.update(status="FAIL", why="bad <script>alert(1)</script> | \x00 \x1b[31m bytes")
    page = to_html(host_report)
    assert "<script>" not in page
    assert page.index("REG-01 register_roundtrip: FAIL") < page.index("<h2>Profiles</h2>")
    suite = ET.fromstring(to_junit(host_report))
    assert suite.get("failures") == "1"
    assert "### REG-01 register_roundtrip: FAIL" in to_markdown(host_report)


def test_html_is_self_contained(host_report):
    page = to_html(host_report)
    assert "http://" not in page.replace(json.dumps(host_report["rerun"]), "")
    assert "src=" not in page
