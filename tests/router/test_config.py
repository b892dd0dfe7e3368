"""Options are checked before anything starts, and say what is wrong."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from kvtransport.errors import ConfigError, UnknownOptionError
from kvtransport_vllm.router import config as cfg


@pytest.mark.parametrize(
    ("text", "name", "url", "named", "rank"),
    [
        ("decode-7=http://h:8000", "decode-7", "http://h:8000", True, None),
        ("http://h:8000/", "decode-0", "http://h:8000", False, None),
        ("h:8000", "decode-0", "http://h:8000", False, None),
        ("a=h:8000", "a", "http://h:8000", True, None),
        ("[::1]:8000", "decode-0", "http://[::1]:8000", False, None),
        ("a=http://[fe80::1]:80/x/", "a", "http://[fe80::1]:80/x", True, None),
        ("a=https://h", "a", "https://h", True, None),
        ("a=http://h:1#dp-rank=3", "a", "http://h:1", True, 3),
    ],
)
def test_engine_addresses(text, name, url, named, rank):
    (spec,) = cfg.parse_engines([text], "decode")
    assert spec == cfg.EngineSpec(name=name, url=url, named=named, dp_rank=rank)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://h:1",
        "http://",
        "http://h:0",
        "http://h:70000",
        "http://h:x",
        "http://user:pw@h:1",
        "http://h:1/?q=1",
        "http://h:1#rank=3",
        "http://[::1:80",
        "-bad=http://h:1",
        "x" * 65 + "=http://h:1",
    ],
)
def test_what_is_no_engine_address_is_named(text):
    with pytest.raises(ConfigError, match="--decode") as caught:
        cfg.parse_engines([text], "decode")
    assert repr(text) in str(caught.value)


def test_engine_names_are_unique():
    with pytest.raises(ConfigError, match="taken"):
        cfg.parse_engines(["a=h:1", "a=h:2"], "decode")
    with pytest.raises(ConfigError, match="taken"):
        cfg.parse_engines(["h:1", "decode-0=h:2"], "decode")


@pytest.mark.parametrize("text", ["", "cookie:x", "header:", "header:a b", "body:a..b", "header"])
def test_what_is_no_source_is_named(text):
    with pytest.raises(ConfigError, match="--affinity"):
        cfg.parse_sources(text, "--affinity", content=True)


def test_a_tenant_has_no_content():
    with pytest.raises(ConfigError, match="--tenant"):
        cfg.parse_sources("content", "--tenant", content=False)
    assert cfg.parse_sources("none", "--tenant", content=False) == ()


def test_affinity_outlives_the_retained_blocks():
    assert cfg.check_ttl(480, 480) == 480
    with pytest.raises(ConfigError, match="--decoder-kv-blocks-ttl"):
        cfg.check_ttl(479, 480)


def test_limits():
    limits = cfg.parse_limits(["max-attempts=5", "prefill-timeout=1.5"])
    assert (limits.max_attempts, limits.prefill_timeout_s) == (5, 1.5)
    with pytest.raises(UnknownOptionError, match="try prefill-timeout"):
        cfg.parse_limits(["prefil-timeout=1"])


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "x", "1.5"])
def test_a_limit_is_a_positive_number(value):
    with pytest.raises(ConfigError, match="max-attempts"):
        cfg.parse_limits([f"max-attempts={value}"])


def run(*options, env=None):
    return subprocess.run(
        [sys.executable, "-m", "kvtransport_vllm.router", *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=env,
    )


GOOD = ("--prefill", "p=http://127.0.0.1:1", "--decode", "d=http://127.0.0.1:2", "--port", "0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--decode", "d=h:1"), "--prefill"),
        ((*GOOD, "--nonsense", "1"), "--nonsense"),
        ((*GOOD, "extra"), "extra"),
        ((*GOOD, "--port", "70000"), "--port"),
        ((*GOOD, "--host", "192.0.2.1"), "--host"),
        ((*GOOD, "--affinity-ttl", "10"), "--affinity-ttl"),
        ((*GOOD, "--limit", "nothing=1"), "--limit"),
        ((*GOOD, "--on-prefill-failure", "panic"), "--on-prefill-failure"),
        ((*GOOD, "--secret-file", "/nowhere"), "--secret-file"),
        ((*GOOD, "--secret-file", "/dev/null"), "secret"),
        ((*GOOD, "--affinity-entries", "0"), "--affinity-entries"),
        ((*GOOD, "--forward-header", "a b"), "--forward-header"),
        ((*GOOD, "--log-level", "loud"), "--log-level"),
        ((*GOOD, "--redis-url", "http://h"), "--redis-url"),
    ],
)
def test_the_command_refuses_and_names_the_option(options, words):
    result = run(*options)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_it_brings_in_neither_an_engine_nor_a_web_server():
    code = (
        "import sys, kvtransport_vllm.router.cli;"
        "heavy = {'vllm', 'torch', 'aiohttp', 'uvicorn', 'redis'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_first_byte_does_not_wait_for_an_acknowledgement(host):
    server = pytest.importorskip("kvtransport_vllm.router.server")
    # asyncio sets TCP_NODELAY only on sockets that name their protocol.
    with server._bound(host, 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
