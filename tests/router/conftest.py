"""Real router and engine processes on loopback, and a plain HTTP client."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STANDIN = Path(__file__).with_name("standin_engine.py")
DEADLINE_S = 20.0
PROBES = ("--limit", "probe-interval=0.2", "--limit", "probe-timeout=1")
_ids = itertools.count()


def until(condition, what: str = "it"):
    """Poll until ``condition()`` is true and return its value."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {DEADLINE_S} s for {what}")


class Response:
    def __init__(self, raw: http.client.HTTPResponse, connection) -> None:
        self.raw = raw
        self.connection = connection
        self.status = raw.status
        self.headers = {name.lower(): value for name, value in raw.getheaders()}
        self.body = b""

    def read(self) -> Response:
        self.body = self.raw.read()
        self.connection.close()
        return self

    def json(self):
        return json.loads(self.body)

    def pieces(self):
        """The body as it arrives; IncompleteRead when it was cut off."""
        while piece := self.raw.read1(65536):
            yield piece

    def close(self) -> None:
        self.raw.close()
        self.connection.close()


class Server:
    """A process with an HTTP port."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = 0
        self.process: subprocess.Popen | None = None
        self.log = ""

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else self.netloc

    @property
    def netloc(self) -> str:
        return f"http://{self.host}:{self.port}"

    def open(self, method: str, path: str, body=None, headers=None) -> Response:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        return Response(connection.getresponse(), connection)

    def get(self, path: str, headers=None) -> Response:
        return self.open("GET", path, None, headers).read()

    def post(self, path: str, body, headers=None) -> Response:
        return self.open("POST", path, body, headers).read()

    def chat(self, text: str = "hello", headers=None, **fields) -> Response:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", body, headers)

    def open_chat(self, text: str = "hello", headers=None, **fields) -> Response:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return self.open("POST", "/v1/chat/completions", {**body, "stream": True}, headers)

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
            if how in {signal.SIGKILL, signal.SIGTERM}:
                self.process.wait(DEADLINE_S)


class EngineProcess(Server):
    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self.name = name
        self.start()

    def start(self) -> None:
        """Start it; a second time on the port of the first."""
        self.process = subprocess.Popen(
            [sys.executable, str(STANDIN), self.name, self.host, str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with self.process.stdout as pipe:
            self.port = int(pipe.readline())

    def behave(self, **behaviour) -> None:
        self.post("/_behave", behaviour)

    def open_gate(self) -> None:
        self.post("/_open", {})

    def reset(self) -> None:
        self.post("/_reset", {})

    @property
    def seen(self) -> list[dict]:
        return self.get("/_seen").json()["requests"]

    @property
    def bodies(self) -> list[dict]:
        return [request["body"] for request in self.seen]

    @property
    def health_checks(self) -> int:
        return self.get("/_seen").json()["health_checks"]


class RouterProcess(Server):
    def __init__(self, prefills, decodes, *options: str, host: str = "127.0.0.1", env=None) -> None:
        super().__init__(host)
        self.prefills = list(prefills)
        self.decodes = list(decodes)
        command = [sys.executable, "-m", "kvtransport_vllm.router", "--host", host, "--port", "0"]
        for role, engines in (("--prefill", self.prefills), ("--decode", self.decodes)):
            for engine in engines:
                command += [role, f"{engine.name}={engine.url}"]
        self.process = subprocess.Popen(
            [*command, *PROBES, *options],
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        os.set_blocking(self.process.stderr.fileno(), False)
        found = until(lambda: re.search(r"listening on http://\S+:(\d+)", self.read_log()), "port")
        self.port = int(found[1])

    def read_log(self) -> str:
        """Everything it logged so far."""
        while select.select([self.process.stderr], [], [], 0)[0]:
            part = self.process.stderr.read(65536)
            if not part:
                break
            self.log += part.decode()
        return self.log

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        text = self.get("/metrics").body.decode()
        total = 0.0
        for line in text.splitlines():
            if not line.startswith((f"{name}{{", f"{name} ")):
                continue
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def states(self) -> dict[str, str]:
        health = self.get("/health").json()
        return {**health["prefill"], **health["decode"]}

    def wait_state(self, engine: str, *states: str) -> None:
        until(lambda: self.states()[engine] in states, f"{engine} to be {states}")


def finish(server: Server) -> None:
    if server.process is None:
        return
    server.kill()
    for stream in (server.process.stdout, server.process.stderr):
        if stream is not None:
            stream.close()
    server.process.wait(DEADLINE_S)


@pytest.fixture
def start(request):
    """``start.engine(name)`` and ``start.router(prefills, decodes, *options)``."""
    servers: list[Server] = []

    class Start:
        @staticmethod
        def engine(name: str, host: str = "127.0.0.1") -> EngineProcess:
            servers.append(EngineProcess(name, host))
            return servers[-1]

        @staticmethod
        def router(prefills, decodes, *options, **kwargs) -> RouterProcess:
            servers.append(RouterProcess(prefills, decodes, *options, **kwargs))
            return servers[-1]

        def cluster(self, prefills: int, decodes: int, *options, **kwargs) -> RouterProcess:
            ps = [self.engine(f"prefill-{i}") for i in range(prefills)]
            ds = [self.engine(f"decode-{i}") for i in range(decodes)]
            return self.router(ps, ds, *options, **kwargs)

    yield Start()
    for server in servers:
        finish(server)


@pytest.fixture(scope="session")
def _shared_cluster():
    ps = [EngineProcess(f"prefill-{i}") for i in range(2)]
    ds = [EngineProcess(f"decode-{i}") for i in range(2)]
    router = RouterProcess(ps, ds, "--allow-reuse-override")
    yield router
    for server in (router, *ps, *ds):
        finish(server)


@pytest.fixture
def cluster(_shared_cluster):
    """Two prefill and two decode engines behind a router; for tests that kill nothing."""
    for engine in (*_shared_cluster.prefills, *_shared_cluster.decodes):
        engine.reset()
        _shared_cluster.wait_state(engine.name, "up")
    yield _shared_cluster
    for engine in (*_shared_cluster.prefills, *_shared_cluster.decodes):
        engine.reset()


@pytest.fixture
def new_id():
    """A conversation id that no other test uses."""
    return lambda: f"conversation-{next(_ids)}"


@pytest.fixture
def eventually():
    return until
