"""Configuration: precedence, provenance and errors that name the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest
from support.loopback import Loopback, LoopbackConfig

from kvtransport.config import backend_config, decode, environment_name, options_of, resolve
from kvtransport.errors import ConfigError, UnknownOptionError


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    path: Literal["auto", "tcp", "vm"] = "auto"
    port: int = 0
    timeout_s: float = 1.5
    peers: tuple[str, ...] = ()
    extra: Mapping[str, int] = field(default_factory=dict)
    token: str = field(default="", metadata={"secret": True, "help": "shared secret"})
    verbose: bool = False
    inner: Inner = Inner()

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        if self.timeout_s == 0:
            raise ValueError("timeout_s must not be 0")


class Struct(msgspec.Struct, frozen=True):
    name: str
    count: int = 3


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    import os

    for name in os.environ:
        if name.startswith("KVT_"):
            monkeypatch.delenv(name)


def test_decode():
    config = decode(
        Config, {"path": "tcp", "peers": ["a", "b"], "timeout_s": 2, "inner": {"depth": 4}}
    )
    assert config == Config("tcp", timeout_s=2.0, peers=("a", "b"), inner=Inner(4))
    assert decode(Struct, {"name": "x"}) == Struct("x", 3)


@pytest.mark.parametrize(
    ("kind", "values", "error", "words"),
    [
        (
            Config,
            {"prot": 1},
            UnknownOptionError,
            r"test has no option 'prot'; did you mean 'port'",
        ),
        (Config, {"zzz": 1}, UnknownOptionError, r"'zzz'; its options are: extra, inner, path"),
        (Config, {"inner": {"dpeth": 1}}, UnknownOptionError, r"test.inner .*did you mean 'depth'"),
        (Config, {7: 1}, UnknownOptionError, r"'7'"),
        (Config, {"port": "1"}, ConfigError, r"port='1' is not valid: expected `int`, got `str`"),
        (Config, {"port": 1.5}, ConfigError, r"port=1.5"),
        (Config, {"port": True}, ConfigError, r"port=True"),
        (Config, {"path": "udp"}, ConfigError, r"path='udp'"),
        (Config, {"peers": [1]}, ConfigError, r"peers=\[1\]"),
        (Config, {"token": 5}, ConfigError, r"token=\*\*\* is not valid"),
        (Config, {"port": 70000}, ConfigError, r"test: port must be 0 to 65535, got 70000"),
        (Config, {"timeout_s": 0}, ConfigError, r"test: timeout_s must not be 0"),
        (Struct, {}, ConfigError, r"'name' is required"),
        (Config, [1], ConfigError, r"must be a mapping.*list"),
    ],
)
def test_refusals(kind, values, error, words):
    with pytest.raises(error, match=words):
        decode(kind, values, where="test")


def test_precedence_and_provenance(tmp_path):
    file = tmp_path / "kvt.toml"
    file.write_text(
        '[backend.test]\npath = "tcp"\nport = 1\ntimeout_s = 9\n[backend.test.inner]\ndepth = 2\n'
    )
    found = resolve(
        Config,
        "backend.test",
        argument={"path": "vm"},
        environment={"KVT_TEST_PORT": "2", "KVT_TEST_PATH": "auto", "HOME": "/"},
        file=file,
    )
    assert found.config == Config("vm", port=2, timeout_s=9.0, inner=Inner(2))
    sources = {name: origin.source for name, origin in found.origins.items()}
    assert sources["path"] == "argument"
    assert sources["port"] == "environment KVT_TEST_PORT"
    assert sources["timeout_s"] == f"file {file}"
    assert sources["peers"] == "default"
    assert found.origins["port"].shown == "2"


def test_environment_values_are_converted():
    found = resolve(
        Config,
        "backend.test",
        environment={
            "KVT_TEST_VERBOSE": "true",
            "KVT_TEST_TIMEOUT_S": "0.25",
            "KVT_TEST_TOKEN": "s",
        },
    )
    assert found.config == Config(verbose=True, timeout_s=0.25, token="s")
    assert found.origins["token"].shown == "***"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"KVT_TEST_PROT": "1"}, "KVT_TEST_PROT sets nothing; did you mean KVT_TEST_PORT"),
        ({"KVT_TEST_PORT": "one"}, "environment.*port='one'"),
    ],
)
def test_bad_environment(environment, words):
    with pytest.raises(ConfigError, match=words):
        resolve(Config, "backend.test", environment=environment)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[backend.test]\nprot = 1\n", r"file .*kvt.toml, backend.test has no option 'prot'"),
        ("[backend.test]\nport = 'x'\n", r"file .*kvt.toml, backend.test: port='x'"),
        ("[backend\n", "not valid TOML"),
        ("backend = 3\n[other]\n", None),
        ("[backend]\ntest = 3\n", "must be a table"),
    ],
)
def test_bad_file(tmp_path, monkeypatch, text, words):
    file = tmp_path / "kvt.toml"
    file.write_text(text)
    monkeypatch.setenv("KVT_CONFIG", str(file))
    if words is None:
        assert resolve(Config, "backend.test").config == Config()
        return
    with pytest.raises(ConfigError, match=words):
        resolve(Config, "backend.test")


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read.*nowhere"):
        resolve(Config, "x", file=tmp_path / "nowhere")


def test_backend_config(monkeypatch):
    ready = LoopbackConfig(label="mine")
    assert backend_config(Loopback.info, ready) is ready
    assert backend_config(Loopback.info, None) == LoopbackConfig()
    monkeypatch.setenv("KVT_LOOPBACK_LABEL", "env")
    assert backend_config(Loopback.info, {}).label == "env"
    assert backend_config(Loopback.info, {"label": "arg"}).label == "arg"
    with pytest.raises(ConfigError, match="LoopbackConfig or a mapping, got str"):
        backend_config(Loopback.info, "host")


def test_environment_name():
    assert environment_name("backend.acme-x", "port") == "KVT_ACME_X_PORT"


def test_options_of():
    options = options_of(Config)
    assert options["token"].secret
    assert options["token"].help == "shared secret"
    assert options["extra"].default == {}
    assert options_of(Struct)["name"].required
    with pytest.raises(ConfigError):
        options_of(int)
