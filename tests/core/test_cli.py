"""``kvt`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvtransport import cli, registry


def kvt(*arguments, code=None, **environment):
    command = [sys.executable, "-c", code or "from kvtransport.cli import main; main()", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment},
    )


def test_backends_lists_every_installed_one():
    done = kvt("backends", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == set(registry.installed())
    assert rows["host"]["available"] is True
    for row in rows.values():
        assert row["available"] or row["reason"], "an absent backend says why"


def test_backends_table():
    done = kvt("backends")
    assert done.returncode == 0, done.stderr
    assert "host" in done.stdout
    assert "yes" in done.stdout


def test_config_explain_names_the_source():
    done = kvt("config", "explain", "-b", "host", "--json", KVT_HOST_PATH="tcp")
    assert done.returncode == 0, done.stderr
    option = json.loads(done.stdout)["backend.host"]["path"]
    assert option == {
        "value": "'tcp'",
        "source": "environment KVT_HOST_PATH",
        "variable": "KVT_HOST_PATH",
    }


def test_config_explain_table():
    done = kvt("config", "explain")
    assert done.returncode == 0, done.stderr
    assert "KVT_AGENT_DRAIN_S" in done.stdout


def test_errors_are_one_line():
    done = kvt("config", "explain", "-b", "hots")
    assert done.returncode == 1
    assert done.stderr.startswith("kvt: no installed distribution provides backend 'hots'")
    assert "Traceback" not in done.stderr


def test_version_and_help():
    assert "kvtransport" in kvt("--version").stdout
    done = kvt("--help")
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert name in done.stdout


def test_kvt_works_without_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None; sys.modules['torch'] = None\n"
        "from kvtransport.cli import main; main()"
    )
    for arguments in (["--help"], ["backends"], ["router", "--help"]):
        done = kvt(*arguments, code=code)
        assert done.returncode == 0, done.stderr


def test_help_belongs_to_the_subcommand():
    done = kvt("config", "explain", "--help")
    assert done.returncode == 0
    assert "--backend" in done.stdout


def test_missing_module_gives_the_hint():
    command = cli.Subcommand("no_such_module_here:app", "x", "pip install y")
    with pytest.raises(SystemExit, match=r"'no_such_module_here'.*pip install y"):
        cli.load("x", command)
