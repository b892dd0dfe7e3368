"""Backends as entry points of installed distributions; these tests install some."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from kvtransport import registry
from kvtransport.agent import Agent
from kvtransport.errors import (
    BackendContractError,
    BackendUnavailableError,
    UnknownBackendError,
)

MODULE = """
    from dataclasses import dataclass
    from kvtransport.backend import BackendInfo

    @dataclass(frozen=True)
    class Config:
        pass

    def load():
        {load}

    INFO = BackendInfo(
        name={name!r}, summary="for tests", config=Config, load=load, wire="t/1",
        api_version={api}, install_hint="pip install acme-driver",
    )
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution whose module defines one backend."""

    def make(dist, backend, *, load="import acme_missing_driver", api=1, name=None, target=None):
        module = dist.replace("-", "_")
        source = MODULE.format(load=load, name=name or backend, api=api)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(
            f"[kvtransport.backends]\n{backend} = {target or module}:INFO\n"
        )
        importlib.invalidate_caches()
        registry.refresh()

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield make
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]
    registry.refresh()


def test_our_own_are_found_the_same_way():
    assert "host" in registry.installed()
    info = registry.find_backend("host")
    assert info.name == "host"


def test_the_view_is_read_only():
    with pytest.raises(TypeError):
        registry.installed()["x"] = ()


def test_listing_imports_nothing(install):
    install("acme-kv", "acme")
    (entry,) = registry.installed()["acme"]
    assert (entry.distribution, entry.version) == ("acme-kv", "1.2")
    assert "acme_kv" not in sys.modules


def test_unknown_name():
    with pytest.raises(UnknownBackendError, match="'hots'; did you mean 'host'"):
        registry.load("hots")
    with pytest.raises(UnknownBackendError, match=r"installed are: .*host.*kvtransport.backends"):
        Agent.open("zzzz", name="x")


def test_two_distributions_with_one_name(install):
    install("acme-kv", "acme")
    install("acme-other", "acme")
    with pytest.raises(UnknownBackendError, match=r"acme-(kv|other) 1.2 and acme-(kv|other) 1.2"):
        registry.load("acme")


def test_missing_driver_gives_the_install_hint(install):
    install("acme-kv", "acme")
    assert registry.find_backend("acme").summary == "for tests"
    with pytest.raises(BackendUnavailableError, match="pip install acme-driver") as raised:
        registry.load("acme")
    assert raised.value.hint == "pip install acme-driver"


def test_another_contract_version(install):
    install("acme-kv", "acme", api=99)
    with pytest.raises(
        BackendUnavailableError, match=r"acme-kv 1.2 implements version 99.*has version 1"
    ):
        registry.load("acme")


def test_broken_distribution(install):
    install("acme-kv", "acme", target="acme_no_such_module")
    with pytest.raises(BackendUnavailableError, match="Reinstall acme-kv"):
        registry.load("acme")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"name": "other"}, "named 'acme'"), ({"load": "return int"}, "no Backend")],
)
def test_entry_point_that_is_none(install, options, words):
    install("acme-kv", "acme", **options)
    with pytest.raises(BackendContractError, match=words):
        registry.load("acme")
