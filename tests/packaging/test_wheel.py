"""The wheel holds all four packages, typed, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "kvtransport": "kvtransport",
    "kvtransport_backends": "backends",
    "kvtransport_conformance": "conformance",
    "kvtransport_vllm": "vllm_adapter",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    # The build writes into the tree it builds from, so it gets a copy.
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", "pyproject.toml", "README.md", "LICENSE", *FOLDERS.values()):
        subprocess.run(["cp", "-a", str(ROOT / name), str(tree)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(target), str(tree)], check=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_only_our_packages_are_in_it(names):
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(FOLDERS)


@pytest.mark.parametrize(("package", "folder"), FOLDERS.items())
def test_every_module_and_the_typing_mark_are_in_it(names, package, folder):
    modules = {
        f"{package}/{file.relative_to(ROOT / folder)}" for file in (ROOT / folder).rglob("*.py")
    }
    assert modules <= names
    assert f"{package}/py.typed" in names


def test_the_licence_is_in_it(names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
