"""The example of the guide is a real backend, and a bug planted in it is pointed at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.suite_runs import run_checks

from kvtransport_conformance import verify

pytestmark = pytest.mark.timeout(240)

GUIDE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"


def example():
    """The text of the smallest backend."""
    found = re.search(
        r"<!-- example: vmcopy.py -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL
    )
    assert found is not None
    return found.group(1)


def installed(folder, text):
    (folder / "vmcopy.py").write_text(text)
    return {"backend": f"{folder / 'vmcopy.py'}:INFO", "config": {}, "peer_config": {}}


def planted(folder, good, bad):
    text = example()
    assert text.count(good) == 1
    return installed(folder, text.replace(good, bad))


SOME = (
    "REG-01", "REG-04", "REG-05", "DSC-02", "DSC-05", "WR-01", "RD-01", "RD-06", "CMP-01", "CMP-02",
    "MD-01", "MD-02", "MD-05", "CAN-02", "CON-03", "PD-01", "TD-01", "TD-04", "TD-08", "SEC-01",
    "INT-01",
)  # fmt: skip


def test_the_example_is_short_enough_to_read():
    assert len(example().splitlines()) < 180


def test_the_example_passes(tmp_path):
    report = run_checks(installed(tmp_path, example()), SOME)
    assert verify.problems(report) == []
    wrong = {key: e for key, e in report["checks"].items() if e["status"] != "PASS"}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_passes_base_and_read(tmp_path):
    report = run_checks(installed(tmp_path, example()), profiles=("KVT-BASE", "KVT-READ"))
    assert {entry["result"] for entry in report["profiles"].values()} == {"success"}


ENDS = "self._ended.append(Completion(job.ticket))\n                    self._jobs.popleft()"
DIES = "        if birth(pid) != born:\n            raise PeerLostError"

BUGS = {
    "lost offset": (
        "(here + done, there + done, size - done)",
        "(here + done, there, size - done)",
        "RD-01",
        r"the first at byte 104857\d .*hold the data of pattern 2 at byte \d: misplaced",
    ),
    "completes twice": (
        ENDS,
        ENDS.replace("self._jobs.popleft()", "job.steps.append((0, 0, 0))"),
        "CMP-01",
        r"the backend completed tickets .* more than once",
    ),
    "forgets a count": (
        "if region not in table or far + size > table[region][1]:",
        "if len(blocks) == 31:\n                return\n            if region not in table:",
        "DSC-05",
        r"TransferTimeoutError.*is not finished after",
    ),
    "aborts on death": (
        DIES,
        DIES.replace("raise PeerLostError", "os.abort()\n            raise PeerLostError"),
        "PD-01",
        r"killed by SIGABRT.*vmcopy.py.*_copy_some",
    ),
}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=pytest.mark.slow if b == "forgets a count" else ()) for b in BUGS],
)
def test_a_planted_bug_is_pointed_at(tmp_path, bug):
    good, bad, check, words = BUGS[bug]
    report = run_checks(planted(tmp_path, good, bad), (check, "MD-04"), watchdog_scale=2.0)
    found = report["checks"][check]
    assert found["status"] in {"FAIL", "CRASH"}
    assert report["checks"]["MD-04"]["status"] == "PASS"
    assert re.search(words, found["why"], re.DOTALL), found["why"]
