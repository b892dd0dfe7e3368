from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(240)


def run_pytest(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "-rs",
         *words],
        cwd=folder, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


def test_a_vendors_three_lines(tmp_path):
    (tmp_path / "acme.py").write_text(
        "from kvtransport_conformance import HostMemory, Target\n"
        "class Simulated(HostMemory):\n"
        "    def device_info(self):\n"
        "        return {'name': 'simulated-acme'}\n"
        "TARGET = Target(backend='host', memory=[Simulated()])\n"
    )
    (tmp_path / "test_acme.py").write_text(
        "from kvtransport_conformance.pytest_plugin import conformance_suite\n"
        "from acme import TARGET\n"
        "TestConformance = conformance_suite(TARGET, checks=['REG-01', 'SEC-02', 'DSC-01'])\n"
    )
    report = tmp_path / "out"
    found = run_pytest(tmp_path, "--kvt-report", str(report), "--kvt-seed", "4")
    assert found.returncode == 0, found.stdout
    assert "2 passed, 1 skipped" in found.stdout
    assert "NOT_SUPPORTED" in found.stdout
    assert (report / "report.json").is_file()
    assert '"seed": 4' in (report / "report.json").read_text()


def test_a_failure_points_at_the_cause_and_tells_how_to_repeat_it(tmp_path):
    (tmp_path / "test_broken.py").write_text(
        "from kvtransport_conformance import Target\n"
        "from kvtransport_conformance.pytest_plugin import conformance_suite\n"
        "TARGET = Target(backend='kvtransport_conformance.saboteurs.data:Overruns')\n"
        "TestConformance = conformance_suite(TARGET, checks=['WR-02', 'REG-02'])\n"
    )
    found = run_pytest(tmp_path)
    assert found.returncode == 1
    assert "1 failed, 1 passed" in found.stdout
    assert "outside every range named by the transfer" in found.stdout
    assert "--check WR-02" in found.stdout


def test_without_a_backend_the_packaged_suite_is_skipped(tmp_path):
    found = run_pytest(tmp_path, "--pyargs", "kvtransport_conformance")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "pass --kvt-backend NAME" in found.stdout


def test_the_packaged_suite_runs_a_named_backend(tmp_path):
    found = run_pytest(
        tmp_path, "--pyargs", "kvtransport_conformance", "--kvt-backend", "host",
        "-k", "REG-02 or DSC-06",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 passed" in found.stdout


def test_a_backend_that_dies_at_open_leaves_a_report_too(tmp_path):
    (tmp_path / "dying.py").write_text(
        "import os\n"
        "from kvtransport_conformance.saboteurs.base import BrokenBackend\n"
        "class Dies(BrokenBackend):\n"
        "    def open(self, *_):\n"
        "        os.abort()\n"
    )
    (tmp_path / "test_dying.py").write_text(
        "from kvtransport_conformance import Target\n"
        "from kvtransport_conformance.pytest_plugin import conformance_suite\n"
        "TestConformance = conformance_suite(Target(backend='dying:Dies'), checks=['REG-02'])\n"
    )
    report = tmp_path / "out"
    found = run_pytest(tmp_path, "--kvt-report", str(report))
    assert found.returncode == 1
    assert "CRASH while loading or opening" in found.stdout
    made = json.loads((report / "report.json").read_text())
    assert made["complete"]
    assert made["setup"]["status"] == "CRASH"
