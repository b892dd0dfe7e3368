from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.suite_runs import BROKEN
from typer.testing import CliRunner

from kvtransport_conformance.cli import app
from kvtransport_conformance.report import write

pytestmark = pytest.mark.timeout(240)

RUNNER = CliRunner()


def kvt(*words):
    """Run ``kvt conformance`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from kvtransport.cli import main; main()", "conformance", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def ask(*words):
    return RUNNER.invoke(app, list(words))


def test_list_and_explain():
    listed = ask("list", "--profile", "KVT-READ")
    assert listed.exit_code == 0
    assert "RD-01" in listed.output
    assert "WR-01" not in listed.output
    told = ask("explain", "cmp-06")
    assert "nothing of it lands" in told.output
    assert "vllm#56104" in told.output
    assert "core in KVT-FAULT" in told.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("explain", "XYZ-99"), "no check 'XYZ-99'"),
        (("list", "--profile", "KVT-X"), "no profile 'KVT-X'"),
        (("run",), "name what to test"),
        (("run", "--backend", "host", "--check", "REG-99"), "no check REG-99"),
        (("run", "--backend", "host", "--skip", "REG-01"), "needs a reason"),
        (("run", "--backend", "host", "--config", "path"), "must be key=value"),
        (("saboteurs", "--only", "Nobody"), "no saboteur Nobody"),
        (("matrix", "/nonexistent/folder"), "No such file"),
    ],
)
def test_a_wrong_request_is_exit_code_4(words, text):
    found = ask(*words)
    assert found.exit_code == 4
    assert text in found.output.replace("\n", " ")


def test_an_unknown_backend_is_no_verdict():
    found = kvt("run", "--backend", "hots", "--check", "REG-01")
    assert found.returncode == 4
    assert "did you mean 'host'" in found.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("backend", "code", "word"),
    [
        ("host", 2, "partial"),
        (f"{BROKEN}:RaisesOutside", 1, "FAILURE"),
        (f"{BROKEN}:Unavailable", 3, "not verified"),
    ],
)
def test_exit_codes_and_reports(backend, code, word, tmp_path):
    found = kvt(
        "run", "--backend", backend, "--check", "REG-01,REG-02", "--seed", "3",
        "--report", str(tmp_path / "out"),
    )  # fmt: skip
    assert found.returncode == code, found.stdout + found.stderr
    assert word in found.stdout
    assert "--seed 3" in found.stdout.replace("\n", " ")
    assert ask("verify", str(tmp_path / "out" / "report.json")).exit_code == 0
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


def test_verify_and_diff_of_files(host_report, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write(good, host_report)
    host_report["checks"]["REG-01"]["status"] = "FAIL"
    write(bad, host_report)
    assert ask("verify", str(good)).exit_code == 0
    found = ask("verify", str(good), str(bad))
    assert found.exit_code == 1
    assert "NOT SOUND" in found.output
    assert ask("diff", str(good), str(bad)).exit_code == 1
    assert ask("diff", str(bad), str(good)).exit_code == 0
    (tmp_path / "junk.json").write_text("[1, 2")
    assert ask("verify", str(tmp_path / "junk.json")).exit_code == 1


def test_matrix_checks_a_file(host_report, tmp_path):
    from kvtransport_conformance.matrix import BEGIN, END

    reports, page = tmp_path / "reports", tmp_path / "README.md"
    reports.mkdir()
    write(reports / "host.json", host_report)
    page.write_text(f"# x\n{BEGIN}\n{END}\n")
    assert ask("matrix", str(reports), "--check", str(page)).exit_code == 1
    assert ask("matrix", str(reports), "--write", str(page)).exit_code == 0
    assert ask("matrix", str(reports), "--check", str(page)).exit_code == 0
    assert "| `host` |" in page.read_text()


def test_waivers(tmp_path):
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps({"REG-77": {"url": "https://x.test/1", "until": "2099-01-01"}}))
    found = ask("run", "--backend", "host", "--waivers", str(path))
    assert found.exit_code == 4
    assert "REG-77" in found.output
    path.write_text(json.dumps({"REG-01": {"url": "https://x.test/1"}}))
    assert ask("run", "--backend", "host", "--waivers", str(path)).exit_code == 4
