"""Handshakes that do not come, and the limits of a fabric."""

from __future__ import annotations

import threading

import pytest

from kvtransport.errors import (
    HandshakeTimeoutError,
    MalformedMetadataError,
    PeerLostError,
    UnsupportedError,
)
from kvtransport_backends.nixl.connect import MAX_AGENTS, Bounded
from kvtransport_backends.nixl.liveness import Beacon, Liveness


class Handshaker:
    """The one NIXL method that ``Bounded`` calls."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.answered.set()

    def makeConnection(self, _name: str, _plugins: list[int]) -> None:  # noqa: N802
        self.answered.wait(10)


def test_a_late_handshake_is_taken_up_by_the_next_attempt():
    agent, loads = Handshaker(), []
    connector = Bounded(agent, 1, 0.1)
    agent.answered.clear()
    for _ in range(2):
        with pytest.raises(HandshakeTimeoutError):
            connector.connect("peer", lambda: loads.append(1))
    assert connector.busy
    agent.answered.set()
    connector.connect("peer", lambda: loads.append(1))
    assert loads == [1]
    assert not connector.busy


def test_errors_of_the_attempt_reach_the_caller():
    def fail() -> None:
        raise PeerLostError("gone")

    with pytest.raises(PeerLostError):
        Bounded(Handshaker(), 1, 1.0).connect("peer", fail)


def test_the_number_of_agents_has_a_limit():
    connector = Bounded(Handshaker(), 1, 1.0)
    for index in range(MAX_AGENTS):
        connector.connect(f"peer-{index}", lambda: None)
    connector.connect("peer-0", lambda: None)
    with pytest.raises(UnsupportedError, match="8 bits"):
        connector.connect("one-more", lambda: None)


def wait_until_ended(liveness: Liveness, count: int = 1) -> list[tuple[str, bool]]:
    ended: list[tuple[str, bool]] = []
    for _ in range(200):
        ended += liveness.ended()
        if len(ended) >= count:
            break
        threading.Event().wait(0.01)
    return ended


def test_a_lifeline_ends_with_its_beacon():
    beacon, watcher = Beacon("127.0.0.1"), Liveness("", 2.0)
    watcher.watch("peer", beacon.contact)
    watcher.watch("peer", beacon.contact)  # one lifeline per peer
    assert watcher.ended() == []
    beacon.close()
    assert wait_until_ended(watcher) == [("peer", True)]
    with pytest.raises(PeerLostError, match="nobody answers"):
        watcher.watch("peer", beacon.contact)
    watcher.close()


def test_another_process_on_the_same_port_is_not_the_peer():
    first = Beacon("127.0.0.1")
    contact = first.contact
    port = contact.rpartition(":")[2]
    first.close()
    second = Beacon(f"127.0.0.1:{port}")
    watcher = Liveness("", 2.0)
    with pytest.raises(PeerLostError):
        watcher.watch("peer", contact)
    watcher.watch("peer", second.contact)
    watcher.close()
    second.close()


def test_an_address_that_cannot_be_reached_is_given_up_in_time():
    watcher = Liveness("", 0.3)
    contact = f"{'00' * 16}@192.0.2.1:9"  # a documentation address: nobody answers
    with pytest.raises((HandshakeTimeoutError, PeerLostError)):
        watcher.watch("peer", contact)
    watcher.close()


def test_a_reader_that_leaves_or_talks_does_not_disturb_the_others():
    import socket

    beacon = Beacon("127.0.0.1")
    host, _, port = beacon.contact.partition("@")[2].rpartition(":")
    watcher = Liveness("", 2.0)
    watcher.watch("steady", beacon.contact)
    for chatter in (b"", b"GET / HTTP/1.0\r\n\r\n" * 100):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(chatter)
    watcher.watch("late", beacon.contact)
    assert watcher.ended() == []
    beacon.close()
    assert sorted(wait_until_ended(watcher, 2)) == [("late", True), ("steady", True)]
    watcher.close()


def test_a_peer_without_a_beacon_is_not_watched():
    watcher = Liveness("", 2.0)
    watcher.watch("peer", "")
    assert watcher.ended() == []
    watcher.close()


@pytest.mark.parametrize("contact", ["x", "zz@127.0.0.1:1", "00@127.0.0.1:1", f"{'00' * 16}@host"])
def test_a_malformed_contact_is_the_peers_fault(contact):
    with pytest.raises(MalformedMetadataError):
        Liveness("", 1.0).watch("peer", contact)


def test_a_process_that_dies_says_no_goodbye():
    import subprocess
    import sys

    script = (
        "import sys; from kvtransport_backends.nixl.liveness import Beacon;"
        " print(Beacon('127.0.0.1').contact, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        watcher = Liveness("", 2.0)
        watcher.watch("peer", process.stdout.readline().strip())
        process.kill()
        assert wait_until_ended(watcher) == [("peer", False)]
        watcher.close()
