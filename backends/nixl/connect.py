"""Loading a peer's connection information into NIXL.

UCX connects later, on first use, without blocking.  LIBFABRIC sends a handshake
and, on TCP, retries for ever while the peer does not accept; and a first
transfer would wait a minute for the peer's answer.  Both happen in a thread
here, with a deadline.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from kvtransport.errors import HandshakeTimeoutError, UnsupportedError
from kvtransport_backends.nixl.driver import NativeAgent

Load = Callable[[], None]

MAX_AGENTS = 254
"""How many peers an agent on LIBFABRIC can meet in its life, restarts counted."""


class Connector(ABC):
    """How ``Peers`` loads a connection."""

    @abstractmethod
    def connect(self, name: str, load: Load) -> None:
        """Run ``load``, which gives NIXL the connection of agent ``name``.

        Raises what ``load`` raises, or ``HandshakeTimeoutError``.
        """

    @property
    def busy(self) -> bool:
        """Whether a call into NIXL has not returned yet."""
        return False

    remakes: ClassVar[bool]
    """Whether a connection to a living agent can be dropped and made again."""


class Immediate(Connector):
    """For plugins that do not block."""

    remakes = True

    def connect(self, name: str, load: Load) -> None:  # noqa: ARG002
        load()


class _Attempt:
    """One connection attempt in a thread of its own."""

    def __init__(self, work: Load, name: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"kvt-connect-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # raised again by ``result``
            self._error = error

    def result(self) -> None:
        if self._error is not None:
            raise self._error


class Bounded(Connector):
    """For LIBFABRIC: loads and shakes hands within a deadline.

    An attempt that came too late goes on; the next call for the same agent
    takes up its result, because NIXL cannot be told to stop.  A living agent
    answers the handshake once only.
    """

    remakes = False

    def __init__(self, agent: NativeAgent, plugin_handle: int, timeout_s: float) -> None:
        self._agent = agent
        self._handles = [plugin_handle]
        self._timeout_s = timeout_s
        self._late: dict[str, _Attempt] = {}
        self._known: set[str] = set()

    def connect(self, name: str, load: Load) -> None:
        if name not in self._known and len(self._known) >= MAX_AGENTS:
            raise UnsupportedError(
                f"NIXL's LIBFABRIC numbers the agents it has ever met with 8 bits and this one"
                f" has met {MAX_AGENTS}: close it and open another",
                capability="peers",
            )
        self._known.add(name)

        def work() -> None:
            load()
            self._agent.makeConnection(name, self._handles)

        attempt = self._late.pop(name, None) or _Attempt(work, name)
        attempt.thread.join(self._timeout_s)
        if attempt.thread.is_alive():
            self._late[name] = attempt
            raise HandshakeTimeoutError(
                f"the peer did not answer libfabric's handshake within {self._timeout_s} s;"
                " it may be stopped, or a firewall drops the traffic between the two hosts"
            )
        attempt.result()

    @property
    def busy(self) -> bool:
        return any(attempt.thread.is_alive() for attempt in self._late.values())
