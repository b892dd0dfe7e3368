"""Only the peer's own, living process is ever read; otherwise TCP or a clear refusal."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.host_pair import Remote, pattern

from kvtransport.agent import Agent
from kvtransport.errors import IncompatiblePeerError, PeerLostError
from kvtransport.layout.blocks import Pair
from kvtransport_backends.host import _body
from kvtransport_backends.host._identity import own_identity, start_ticks
from kvtransport_backends.host._vm import VmMemory, VmRefusedError
from kvtransport_backends.host.backend import HostBackend
from kvtransport_backends.host.config import HostConfig

MIB = 1 << 20
TESTS = Path(__file__).parents[2]


@pytest.fixture
def target() -> Iterator[HostBackend]:
    backend = HostBackend()
    backend.open("target", HostConfig())
    yield backend
    backend.close()


@pytest.fixture
def make_backend() -> Iterator[Callable[..., HostBackend]]:
    made: list[HostBackend] = []

    def make(**config: Any) -> HostBackend:
        made.append(HostBackend())
        made[-1].open("initiator", HostConfig(**config))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def forged(target: HostBackend, **changes: Any) -> bytes:
    """The target's export with fields of its identity replaced."""
    body = _body.decode(target.export())
    assert body.vm
    identity = msgspec.structs.replace(body.vm.identity, **changes)
    vm = msgspec.structs.replace(body.vm, identity=identity)
    return _body.encode(msgspec.structs.replace(body, vm=vm))


FORGERIES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "recycled": ({"start_ticks": 12345}, PeerLostError, "was recycled"),
    "gone": ({"pid": 2**22 + 7}, PeerLostError, "does not exist"),
    "another process": ({"pid": os.getppid()}, PeerLostError, "recycled|is not this peer"),
    "another machine": ({"boot_id": "x"}, IncompatiblePeerError, "another machine"),
    "another namespace": ({"pid_namespace": "pid:[1]"}, IncompatiblePeerError, "pid namespace"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_explicit_vm_refuses_and_says_why(
    target: HostBackend, make_backend: Callable[..., HostBackend], name: str
) -> None:
    changes, error, text = FORGERIES[name]
    backend = make_backend(path="vm")
    with pytest.raises(error, match=text):
        backend.import_peer(1, forged(target, **changes))
    assert backend.counters()["peers_tcp"] == 0


@pytest.mark.parametrize("name", FORGERIES)
def test_auto_uses_tcp_instead(
    target: HostBackend, make_backend: Callable[..., HostBackend], name: str
) -> None:
    """And never reads the process that the identity points at."""
    backend = make_backend()
    backend.import_peer(1, forged(target, **FORGERIES[name][0]))
    counters = backend.counters()
    assert (counters["peers_vm"], counters["peers_tcp"]) == (0, 1)


def test_right_process_without_the_nonce_is_refused(
    target: HostBackend, make_backend: Callable[..., HostBackend]
) -> None:
    """The last line of defence: pid and start time fit, the memory does not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        blob = forged(target, pid=child.pid, start_ticks=start_ticks(child.pid))
        with pytest.raises((PeerLostError, IncompatiblePeerError)):
            make_backend(path="vm").import_peer(1, blob)
        own = own_identity()
        with pytest.raises(VmRefusedError, match="nonce"):
            VmMemory(own.pid, np.zeros(4, np.int64).ctypes.data, bytes(range(16)))
    finally:
        child.communicate()


def test_dead_peer_is_refused_on_both_paths(
    make_remote: Callable[..., Remote], make_backend: Callable[..., HostBackend]
) -> None:
    for path in ("vm", "tcp", "auto"):
        remote = make_remote({"path": path})
        remote.call("register", name="kv", nbytes=64)
        reader = Agent.open("host", name="reader", config={"path": path})
        peer = reader.add_peer(bytes.fromhex(remote.call("export")))
        body = peer.body
        remote.kill()
        backend = make_backend(path=path)
        with pytest.raises(PeerLostError):
            backend.import_peer(1, body)
        assert not backend._peers
        reader.close()


def test_paths_that_do_not_meet_name_the_option(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent]
) -> None:
    only_tcp, only_vm = make_remote({"path": "tcp"}, "a"), make_remote({"path": "vm"}, "b")
    with pytest.raises(IncompatiblePeerError, match="path is tcp"):
        make_agent({"path": "vm"}).add_peer(bytes.fromhex(only_tcp.call("export")))
    with pytest.raises(PeerLostError, match="path is vm"):
        make_agent({"path": "tcp"}).add_peer(bytes.fromhex(only_vm.call("export")))


def test_auto_reads_by_vm_or_tcp_as_the_peer_allows(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent]
) -> None:
    for theirs in ("auto", "vm", "tcp"):
        remote = make_remote({"path": theirs})
        remote.call("register", name="kv", nbytes=MIB, seed=1)
        agent = make_agent()
        here = np.zeros(MIB, np.uint8)
        local = agent.register(here, name="mine")
        peer = agent.add_peer(bytes.fromhex(remote.call("export")))
        agent.read(peer, [Pair.ranges(local, [0], peer.region("kv"), [0], [MIB])]).wait(20)
        assert (here == pattern(1, MIB)).all()
        used = "tcp" if theirs == "tcp" else "vm"
        assert agent._backend.counters()[f"{used}_read_bytes"] == MIB


# -- where the kernel refuses ------------------------------------------------

UNPRIVILEGED = """
    import os, sys
    import numpy as np
    from kvtransport.agent import Agent
    from kvtransport.layout.blocks import Pair
    # Imports everything, before the files become unreadable.
    Agent.open("host", name="warm", config={}).close()
    "host".encode("idna")
    os.setgid(65534)
    os.setuid(65534)
    blob, path, op = bytes.fromhex(sys.argv[1]), sys.argv[2], sys.argv[3]
    try:
        agent = Agent.open("host", name="nobody", config={"path": path})
        here = np.full(1 << 20, 9, np.uint8)
        region = agent.register(here, name="mine")
        peer = agent.add_peer(blob)
        ranges = [Pair.ranges(region, [0], peer.region("kv"), [0], [1 << 20])]
        getattr(agent, op)(peer, ranges).wait(20)
        counters = agent._backend.counters()
        print({k: v for k, v in counters.items() if v}, int(here[:100].sum()))
        agent.close()
    except Exception as error:
        print(type(error).__name__, error)
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(blob: str, path: str, op: str) -> str:
    script = textwrap.dedent(UNPRIVILEGED)
    done = subprocess.run(
        [sys.executable, "-c", script, blob, path, op],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


@needs_root
def test_another_user_is_refused_or_served_over_tcp(make_remote: Callable[..., Remote]) -> None:
    remote = make_remote()
    remote.call("register", name="kv", nbytes=MIB)
    remote.call("set", name="kv", value=4)
    blob = remote.call("export")
    refused = as_nobody(blob, "vm", "read")
    assert refused.startswith("IncompatiblePeerError")
    assert "another user" in refused
    assert "allow_ptracer" in refused
    served = as_nobody(blob, "auto", "read")
    assert f"'tcp_read_bytes': {MIB}" in served
    assert served.split()[-1] == "400"


@needs_root
@pytest.mark.parametrize(
    ("namespace", "read_by"), [("--pid", "tcp"), ("--ipc", "vm"), ("--uts", "vm")]
)
def test_peer_in_another_namespace(
    make_remote: Callable[..., Remote],
    make_agent: Callable[..., Agent],
    namespace: str,
    read_by: str,
) -> None:
    """A process id of another namespace names somebody else here: it is not used."""
    remote = make_remote(prefix=["unshare", namespace, "--fork", "--kill-child"])
    remote.call("register", name="kv", nbytes=MIB, seed=1)
    agent = make_agent()
    here = np.zeros(MIB, np.uint8)
    local = agent.register(here, name="mine")
    peer = agent.add_peer(bytes.fromhex(remote.call("export")))
    ranges = [Pair.ranges(local, [0], peer.region("kv"), [0], [MIB])]
    agent.read(peer, ranges).wait(20)
    assert (here == pattern(1, MIB)).all()
    agent.write(peer, ranges).wait(20)
    counters = agent._backend.counters()
    assert counters[f"{read_by}_read_bytes"] == counters[f"{read_by}_write_bytes"] == MIB


@needs_root
def test_peer_in_another_network_is_read_but_not_written(
    make_remote: Callable[..., Remote], make_agent: Callable[..., Agent]
) -> None:
    """Its memory is here, its sockets are not: READ works, WRITE fails and says so."""
    remote = make_remote(prefix=["unshare", "--net", "--fork", "--kill-child"])
    remote.call("register", name="kv", nbytes=MIB, seed=1)
    agent = make_agent({"handshake_timeout_s": 1.0})
    local = agent.register(np.zeros(MIB, np.uint8), name="mine")
    peer = agent.add_peer(bytes.fromhex(remote.call("export")))
    ranges = [Pair.ranges(local, [0], peer.region("kv"), [0], [MIB])]
    agent.read(peer, ranges).wait(20)
    with pytest.raises(PeerLostError, match="cannot connect"):
        agent.write(peer, ranges).wait(20)
    agent.read(peer, ranges).wait(20)


@needs_root
def test_write_is_sent_when_the_target_may_not_fetch_it(
    make_remote: Callable[..., Remote], tmp_path: Any
) -> None:
    """Initiator root, target another user: root reads it, it cannot read root back."""
    script = tmp_path / "peer.py"
    source = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "import support.host_peer as peer\n"
        "peer.Agent.open('host', name='warm').close(); peer.pattern(0, 1)\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "peer.main()\n"
    )
    script.write_text(source)
    script.chmod(0o644)
    tmp_path.chmod(0o755)
    for path, expected in (("auto", "tcp_write_bytes"), ("vm", None)):
        remote = make_remote({"path": path}, script=script)
        remote.call("register", name="kv", nbytes=MIB)
        agent = Agent.open("host", name="root", config={"path": path})
        try:
            local = agent.register(np.full(MIB, 6, np.uint8), name="mine")
            peer = agent.add_peer(bytes.fromhex(remote.call("export")))
            ranges = [Pair.ranges(local, [0], peer.region("kv"), [0], [MIB])]
            if expected is None:
                with pytest.raises(Exception, match="may not read this process"):
                    agent.write(peer, ranges).wait(20)
                continue
            agent.write(peer, ranges).wait(20)
            counters = agent._backend.counters()
            assert counters[expected] == MIB
            assert counters["pull_refused"] == 1
        finally:
            agent.close()
