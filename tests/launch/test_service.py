"""Services start, answer, and never outlive whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from threading import Thread

import pytest

from kvtransport_vllm.launch import Service, ServiceError, free_ports, ports, wait_ready
from kvtransport_vllm.launch.http import HttpStatusError, request

# A stand-in for an engine: serves HTTP and has a child that ignores SIGTERM.
STUBBORN_CHILD = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
SERVER = f"""
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", {STUBBORN_CHILD!r}])
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""

CLIENT = """
import sys
from kvtransport_vllm.launch.http import request
try:
    request(int(sys.argv[1]), "GET", "/", timeout_s=5)
except ConnectionError:
    print("refused", flush=True)
"""


def service(folder: Path, code: str = SERVER, *, grace_s: float = 5.0) -> Service:
    (port,) = free_ports(1)
    return Service(
        "stand-in",
        [sys.executable, "-c", code, str(port)],
        port=port,
        log=folder / "service.log",
        health="/",
        grace_s=grace_s,
    )


def state(pid: int) -> str:
    """The kernel's letter for a process's state; "Z" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def alive(pid: int) -> bool:
    return state(pid) != "Z"


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_serves_then_stops_with_everything_it_started(tmp_path):
    with service(tmp_path) as running:
        running.start()
        wait_ready([running], timeout_s=20)
        pids = running.pids()
        assert len(pids) == 2
    # Reaped too: not even zombies.
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert not running.running


def test_can_start_again_on_the_same_port_after_a_kill(tmp_path):
    with service(tmp_path) as running:
        for _ in range(2):
            running.start()
            wait_ready([running], timeout_s=20)
            pids = running.pids()
            running.kill()
            assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_ends_when_its_starter_ends(tmp_path, end):
    (port,) = free_ports(1)
    starter = textwrap.dedent(f"""
        import signal, sys, time
        from pathlib import Path
        from kvtransport_vllm.launch import Service, wait_ready
        # A shell's background job, which these tests may be, inherits SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        server = Service("s", [sys.executable, "-c", {SERVER!r}, "{port}"], port={port},
                         log=Path({str(tmp_path / "log")!r}), health="/", grace_s=2).start()
        wait_ready([server], timeout_s=20)
        print(*server.pids(), flush=True)
        time.sleep(600)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(process.pid, end)
        process.wait(10)
    assert wait_until_gone(pids) == []


def test_outlives_the_thread_that_started_it(tmp_path):
    with service(tmp_path) as running:
        thread = Thread(target=running.start)
        thread.start()
        thread.join()
        wait_ready([running], timeout_s=20)
        assert running.healthy()


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace_time(tmp_path):
    code = "import signal, time, sys; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    with service(tmp_path, code, grace_s=0.5) as running:
        running.start()
        while not (pids := running.pids()):
            time.sleep(0.05)
    assert wait_until_gone(pids) == []


def test_an_early_end_is_told_with_the_signal_and_the_end_of_the_log(tmp_path):
    code = "import os, sys; print('about to fail', flush=True); os.kill(os.getpid(), 4)"
    with service(tmp_path, code) as running:
        running.start()
        with pytest.raises(ServiceError, match=r"signal SIGILL[\s\S]*about to fail"):
            wait_ready([running], timeout_s=20)


def test_a_service_that_never_answers_ends_the_wait(tmp_path):
    with service(tmp_path, "import time; time.sleep(600)") as running:
        running.start()
        with pytest.raises(ServiceError, match="not ready after"):
            wait_ready([running], timeout_s=0.6)


def test_a_second_start_is_refused(tmp_path):
    with service(tmp_path) as running:
        running.start()
        with pytest.raises(ServiceError, match="already running"):
            running.start()


def test_stop_and_continue_reach_the_command_but_not_the_guard(tmp_path):
    with service(tmp_path) as running:
        running.start()
        wait_ready([running], timeout_s=20)
        running.signal(signal.SIGSTOP)
        while {state(pid) for pid in running.pids()} != {"T"}:
            time.sleep(0.01)
        running.signal(signal.SIGCONT)
        wait_ready([running], timeout_s=20)


def test_cores_pin_the_command(tmp_path):
    core = min(os.sched_getaffinity(0))
    code = "import os, time; print(os.sched_getaffinity(0), flush=True); time.sleep(600)"
    pinned = Service(
        "pinned", [sys.executable, "-c", code], port=1, log=tmp_path / "log", cores=[core]
    )
    with pinned:
        pinned.start()
        while not (said := pinned.log.read_text()):
            time.sleep(0.05)
    assert said == f"{{{core}}}\n"


def test_http_answers_of_400_and_more_are_errors_with_their_body(tmp_path):
    with service(tmp_path) as running:
        running.start()
        wait_ready([running], timeout_s=20)
        with pytest.raises(HttpStatusError, match="404") as caught:
            request(running.port, "GET", "/none-such", timeout_s=5)
    assert caught.value.status == 404


def test_a_peer_that_speaks_no_http_is_a_connection_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]
        client = subprocess.Popen([sys.executable, "-c", CLIENT, str(port)], stdout=subprocess.PIPE)
        with client:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"garbage\r\n\r\n")
            connection.close()
            assert client.stdout.read() == b"refused\n"


def test_free_ports_are_distinct():
    ports = free_ports(20)
    assert len(set(ports)) == 20


def test_free_ports_are_not_those_of_outgoing_connections():
    """Which would be taken by somebody in the seconds that an engine needs to start."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = free_ports(200)
    assert len(set(found)) == 200
    assert max(found) < first


def test_a_port_in_use_is_not_free(monkeypatch, tmp_path):
    with socket.socket() as taken:
        (port,) = free_ports(1)
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(ports, "_candidates", lambda: [port])
        assert free_ports(1) != [port]
    monkeypatch.undo()
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "missing")
    assert free_ports(2)
