"""How a process with such an agent lives and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from support.nixl_side import Here, scattered

from kvtransport.backend import Op

SIZE = 1 << 20
TESTS = Path(__file__).parents[2]


def run_script(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    head = """
        import os, signal, sys, time
        sys.path.insert(0, sys.argv[1])
        from support.nixl_side import Here, There, scattered
        from kvtransport.backend import Op
        SIZE = 1 << 20
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    # Files, not pipes: a peer that the script leaves behind would hold a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(
            [sys.executable, "-c", script, str(TESTS), *arguments],
            stdout=out,
            stderr=err,
            timeout=40,
            check=False,
        )
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())


EXITS = {
    "idle": "",
    "after a transfer": """
        assert here.run(Op.READ, scattered(4, 4096, SIZE)).error is None
    """,
    "with a dead peer": """
        there.kill()
        assert here.run(Op.READ, scattered(4, 4096, SIZE)).error is not None
    """,
    "with a transfer in flight": """
        assert here.run(Op.READ, scattered(4, 4096, SIZE)).error is None
        there.signal(signal.SIGSTOP)
        here.post(Op.READ, scattered(16, 4096, SIZE))
        here.idle(0.1)
    """,
}


@pytest.mark.parametrize("before", EXITS)
def test_exit_without_close(before):
    body = f"""
        there = There("cuda", {{"transports": "tcp"}}, SIZE)
        here = Here("cuda", {{"transports": "tcp"}}, SIZE)
        here.backend.import_peer(1, there.export())
        {textwrap.dedent(EXITS[before]).strip().replace(chr(10), chr(10) + " " * 8)}
        print("ending", time.time(), there.pid, flush=True)
        sys.exit(7)
    """
    done = run_script(body)
    ended = time.time()
    words = done.stdout.split()
    assert words[:1] == ["ending"], done.stderr
    try:
        assert done.returncode == 7, done.stderr
        assert ended - float(words[1]) < 5.0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(words[2]), signal.SIGKILL)


def test_use_after_fork_is_refused():
    done = run_script("""
        from kvtransport.errors import ForkError
        here = Here("cuda", {}, SIZE)
        child = os.fork()
        if child == 0:
            try:
                here.backend.poll()
            except ForkError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        here.backend.close()
    """)
    assert done.returncode == 0, done.stderr


def resources() -> tuple[int, int]:
    fds, tasks = (list(Path(f"/proc/self/{kind}").iterdir()) for kind in ("fd", "task"))
    return len(fds), len(tasks)


def test_agents_that_come_and_go_leave_nothing_behind(there, config):
    remote = there(config, SIZE)
    body = remote.export()
    counts = []
    for cycle in range(25):
        local = Here("cuda", config, SIZE)
        local.backend.import_peer(1, body)
        assert local.run(Op.READ, scattered(4, 4096, SIZE, seed=cycle)).error is None
        local.end()
        counts.append((*resources(), remote.ask("fds")["fds"]))
    # The first cycles load plugins; from then on nothing may grow.
    assert max(fds for fds, _, _ in counts[15:]) <= max(fds for fds, _, _ in counts[2:10])
    assert max(tasks for _, tasks, _ in counts[15:]) <= max(tasks for _, tasks, _ in counts[2:10])
    assert counts[-1][2] <= counts[5][2] + 2


def test_a_peer_that_is_dropped_and_added_again_leaks_nothing(pair):
    local, remote = pair
    body = remote.export()
    fds = []
    for generation in range(2, 32):
        local.backend.drop_peer(generation - 1)
        local.backend.import_peer(generation, body)
        what = scattered(4, 4096, SIZE, seed=generation)
        assert local.run(Op.READ, what, peer=generation).error is None
        fds.append((resources()[0], remote.ask("fds")["fds"]))
    assert fds[-1] == fds[3]


def test_closing_twice_and_use_after_close(here):
    from kvtransport.errors import ClosedError

    local = here(nbytes=SIZE)
    local.backend.close()
    local.backend.close()
    for call in (local.backend.poll, local.backend.export):
        with pytest.raises(ClosedError):
            call()


def test_importing_a_backend_loads_no_driver():
    done = run_script("""
        import kvtransport_backends.cuda, kvtransport_backends.efa, kvtransport_backends.rocm
        for package in (
            kvtransport_backends.cuda, kvtransport_backends.efa, kvtransport_backends.rocm
        ):
            info = package.INFO
            backend = info.load()
            backend.probe(info.config())
            backend.capabilities(info.config())
        assert not [name for name in sys.modules if name.startswith(("nixl", "torch"))]
    """)
    assert done.returncode == 0, done.stderr
