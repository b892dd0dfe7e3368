"""The target side: registered memory, the sockets, and who is being served."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time

from kvtransport.errors import BackendUnavailableError
from kvtransport_backends.host._body import AGENT_ID_BYTES, TOKEN_BYTES, Body, VmAccess
from kvtransport_backends.host._counters import Counters
from kvtransport_backends.host._guard import Guard
from kvtransport_backends.host._handshake import Caller, Credentials
from kvtransport_backends.host._identity import own_identity
from kvtransport_backends.host._listener import Listener
from kvtransport_backends.host._regions import LocalRegions
from kvtransport_backends.host._serve import Inbox, Served
from kvtransport_backends.host._stream import Stream, tune
from kvtransport_backends.host.config import HostConfig, join_address, split_address


class Server:
    """Serves peers from construction to ``close``.

    Raises ``BackendUnavailableError`` when it cannot listen; nothing is left
    open then.
    """

    def __init__(self, config: HostConfig, inbox: Inbox, counters: Counters) -> None:
        self._config = config
        self._inbox = inbox
        self._counters = counters
        agent_id = os.urandom(AGENT_ID_BYTES)
        self._guard = Guard(agent_id, config.max_regions)
        self.regions = LocalRegions(self._guard)
        guard_address = 0 if config.path == "tcp" else self._guard.address
        self.own = Credentials(agent_id, os.urandom(TOKEN_BYTES), guard_address)
        self._vm: VmAccess | None = None
        self._address = ""
        self._served: set[Served] = set()
        self._lock = threading.Lock()
        self._closing = False
        sockets = self._open_sockets()
        self._listener = Listener(
            sockets, self.own, config.handshake_timeout_s, self._serve, counters
        )

    def _open_sockets(self) -> list[socket.socket]:
        sockets: list[socket.socket] = []
        try:
            if self._config.path != "tcp":
                sockets.append(self._open_local())
            if self._config.path != "vm":
                sockets.append(self._open_tcp())
        except OSError as error:
            for sock in sockets:
                sock.close()
            raise BackendUnavailableError(
                f"the host backend cannot listen: {error.strerror or error}",
                hint=f"check the option listen, now {self._config.listen!r}",
                backend="host",
            ) from error
        return sockets

    def _open_local(self) -> socket.socket:
        name = b"kvt-host-" + os.urandom(8).hex().encode()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(b"\0" + name)  # abstract: no file that could be left behind
            self._vm = VmAccess(own_identity(), self._guard.address, self._guard.slots, name)
        except BaseException:
            sock.close()
            raise
        return sock

    def _open_tcp(self) -> socket.socket:
        host, port = split_address(self._config.listen, "listen")
        version = ipaddress.ip_address(host).version
        sock = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        except BaseException:
            sock.close()
            raise
        bound_port = sock.getsockname()[1]
        if self._config.advertise:
            host, port = split_address(self._config.advertise, "advertise", port_optional=True)
            bound_port = port or bound_port
        self._address = join_address(host, bound_port)
        return sock

    def body(self) -> Body:
        """What peers need to know now."""
        return Body(
            self.own.agent_id, self.own.token, self._vm, self._address, self.regions.entries()
        )

    def _serve(self, sock: socket.socket, caller: Caller, pid: int) -> bool:
        with self._lock:
            if self._closing or len(self._served) >= self._config.max_connections:
                self._counters.add("connections_refused")
                return False
            tune(sock, self._config.stall_timeout_s)
            stream = Stream(sock, self._config.stall_timeout_s, self._config.chunk_bytes)
            served = Served(
                stream, caller, pid, self.regions, self._inbox, self._counters, self._ended
            )
            self._served.add(served)
        served.thread.start()
        return True

    def _ended(self, served: Served) -> None:
        with self._lock:
            self._served.discard(served)

    def close(self, deadline: float) -> bool:
        """Show every reader that we are gone, end all threads; True when in time."""
        with self._lock:
            self._closing = True
            served = list(self._served)
        self._guard.invalidate()
        in_time = self._listener.stop(max(deadline - time.monotonic(), 0))
        for one in served:
            one.stop()
        for one in served:
            one.thread.join(max(deadline - time.monotonic(), 0))
            in_time = in_time and not one.thread.is_alive()
        return in_time

    def abandon(self) -> None:
        """Let go of every descriptor; all that a forked child may do."""
        self._listener.abandon()
        for one in self._served:
            one.abandon()
