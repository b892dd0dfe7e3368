"""Backends that crash, hang or print, for the tests of the suite's own robustness."""

from __future__ import annotations

import os
import signal
import threading
import time

from kvtransport.errors import BackendUnavailableError
from kvtransport_conformance.saboteurs.base import BrokenBackend


class CrashesInPost(BrokenBackend):
    """Segfaults at the first transfer of 64 KiB or more."""

    def post(self, ticket, op, peer_id, blocks, notify):
        if blocks.total_bytes == 65536:
            os.kill(os.getpid(), signal.SIGSEGV)
        self.inner.post(ticket, op, peer_id, blocks, notify)


class CrashesInOpen(BrokenBackend):
    def open(self, name, config):
        os.write(2, b"driver: assertion failed: queue != NULL\n")
        os.kill(os.getpid(), signal.SIGABRT)


class HangsInOpen(BrokenBackend):
    def open(self, name, config):
        threading.Event().wait()


class HangsInPost(BrokenBackend):
    """Hangs at the first transfer of 64 KiB."""

    def post(self, ticket, op, peer_id, blocks, notify):
        if blocks.total_bytes == 65536:
            while True:
                time.sleep(0.1)
        self.inner.post(ticket, op, peer_id, blocks, notify)


class PeerCrashesIdle(BrokenBackend):
    """The peer's process dies unasked a moment after its second export."""

    exports = 0

    def open(self, name, config):
        self._peer = name.startswith("peer")
        self.inner.open(name, config)

    def export(self):
        PeerCrashesIdle.exports += 1
        if self._peer and PeerCrashesIdle.exports == 2:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGBUS)).start()
        return self.inner.export()


class Prints(BrokenBackend):
    """Writes on every descriptor a careless library would use."""

    def poll(self):
        os.write(1, b'{"result": {"status": "PASS"}}\n\x00\xff{"id": 1, "ok"')
        os.write(2, b"\xf0garbage\n")
        return self.inner.poll()


class Unavailable(BrokenBackend):
    def open(self, name, config):
        raise BackendUnavailableError("no device of vendor 1234", hint="Plug one in")


class RaisesOutside(BrokenBackend):
    """Lets a driver's exception through in register."""

    def register(self, region):
        raise OSError(12, "cannot pin memory")
