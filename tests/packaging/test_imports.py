"""What importing the packages pulls in, and that their entry points lead somewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

HEAVY = ("torch", "vllm", "nixl", "nixl_cu12", "transformers", "starlette", "httpx", "redis")


def imported_by(statement: str) -> set[str]:
    code = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "package",
    ["kvtransport", "kvtransport_backends", "kvtransport_conformance", "kvtransport_vllm"],
)
def test_packages_import_no_driver_and_no_engine(package):
    assert imported_by(f"import {package}").isdisjoint(HEAVY)


def test_the_core_imports_none_of_the_other_rooms():
    code = """
import pkgutil, importlib, kvtransport
for module in pkgutil.walk_packages(kvtransport.__path__, "kvtransport."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    modules = imported_by(f"exec({code!r})")
    assert modules.isdisjoint(HEAVY)
    others = {"kvtransport_backends", "kvtransport_conformance", "kvtransport_vllm"}
    assert modules.isdisjoint(others)


def test_infos_of_all_backends_load_without_their_drivers():
    code = (
        "from importlib.metadata import entry_points\n"
        "for each in entry_points(group='kvtransport.backends'): each.load()"
    )
    assert imported_by(f"exec({code!r})").isdisjoint(HEAVY)


def test_every_backend_is_registered_under_its_own_name():
    infos = {each.name: each.load() for each in entry_points(group="kvtransport.backends")}
    ours = {name: info for name, info in infos.items() if name in {"host", "cuda", "efa", "rocm"}}
    assert set(ours) == {"host", "cuda", "efa", "rocm"}
    assert {info.name for info in ours.values()} == set(ours)


def test_entry_points_into_vllm_lead_somewhere():
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvtransport")
    assert callable(plugin.load())
