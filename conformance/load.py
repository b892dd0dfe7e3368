"""Operations under load: many transfers in a row, and a receiver that checks at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtransport.errors import BackpressureError, KVTransportError
from kvtransport.transfer import Transfer
from kvtransport_conformance.patterns import Pattern, pattern
from kvtransport_conformance.wire_errors import describe

if TYPE_CHECKING:
    from kvtransport.agent import Agent
    from kvtransport.peer import Peer
    from kvtransport_conformance.memory import Memory

Piece = Sequence[Any]
"""``[local, remote, local_offsets, remote_offsets, nbytes]``: names and vectors."""

_IDLE_S = 0.0002


class Load:
    """Part of ``Station``."""

    if TYPE_CHECKING:

        @property
        def agent(self) -> Agent: ...

        peers: dict[str, Peer]
        memory: dict[str, Memory]

        def pairs(self, pieces: Sequence[Piece], key: str) -> list[Any]: ...

    def rounds(
        self, op: str, pieces: Sequence[Sequence[Piece]], count: int, window: int,
        key: str = "peer", notify: bool = False, deadline_s: float = 30.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Run ``count`` transfers, ``window`` at a time, cycling through ``pieces``.

        Notifications carry the round's number.  Stops at the first failure.
        Returns done, retries after backpressure, bytes, seconds, the longest
        pause between completions and the failure.
        """
        call = self.agent.read if op == "read" else self.agent.write
        prepared = [self.pairs(piece, key) for piece in pieces]
        peer = self.peers[key]

        def post(number: int) -> Transfer:
            payload = b"%d" % number if notify else None
            return call(
                peer, prepared[number % len(prepared)], deadline_s=deadline_s, notify=payload
            )

        return Rounds(self.agent, post, count, window, deadline_s).run()

    def burst(self, count: int, key: str = "peer") -> dict[str, Any]:
        """Send ``count`` numbered messages without data, a few at a time.

        Returns how many were delivered and the error that stopped it, if any;
        backpressure is retried for ten seconds.
        """
        peer = self.peers[key]

        def post(number: int) -> Transfer:
            return self.agent.notify(peer, b"%d" % number, deadline_s=10.0)

        found = Rounds(self.agent, post, count, 16, 10.0).run()
        return {"sent": found["done"], "error": found["failure"]}

    def verify_on_notice(
        self, name: str, wire: Sequence[Any], count: int, patience_s: float
    ) -> dict[str, Any]:
        """Await ``count`` notifications "at source nbytes" and look at the data at once.

        When a notification is seen, ``nbytes`` at ``at`` of buffer ``name`` must
        hold the pattern from ``source`` on.  Returns how many came, and the first
        that came before its data.
        """
        want: Pattern = pattern(wire)
        seen, early = 0, ""
        deadline = time.monotonic() + patience_s
        while seen < count and time.monotonic() < deadline:
            for event in self.agent.notifications():
                seen += 1
                at, source, nbytes = (int(word) for word in event.payload.split())
                if self.memory[name].peek(at, nbytes) != want.data(source, nbytes).tobytes():
                    early = early or f"notification {seen} ({nbytes} bytes at {at})"
            # A pause, because a spinning reader would starve a backend's own threads.
            time.sleep(_IDLE_S)
        return {"seen": seen, "early": early}


@dataclass(slots=True)
class Rounds:
    """One run of ``Load.rounds``."""

    agent: Agent
    post: Callable[[int], Transfer]
    count: int
    window: int
    deadline_s: float
    posted: int = 0
    done: int = 0
    retries: int = 0
    nbytes: int = 0
    stall_s: float = 0.0
    failure: dict[str, Any] | None = None
    _open: deque[Transfer] = field(default_factory=deque)

    def run(self) -> dict[str, Any]:
        started = progressed = time.monotonic()
        while self.done < self.count and self.failure is None:
            self._fill()
            finished = self._collect()
            now = time.monotonic()
            if finished:
                self.stall_s = max(self.stall_s, now - progressed)
                progressed = now
            elif now - progressed > self.deadline_s:
                self.failure = {"type": "stall", "message": f"nothing ended in {self.deadline_s} s"}
            else:
                time.sleep(0 if self.window > 1 else _IDLE_S)
        return {
            "done": self.done,
            "retries": self.retries,
            "nbytes": self.nbytes,
            "stall_s": round(self.stall_s, 4),
            "failure": self.failure,
            "seconds": time.monotonic() - started,
        }

    def _fill(self) -> None:
        while self.posted < self.count and len(self._open) < self.window:
            try:
                self._open.append(self.post(self.posted))
            except BackpressureError:
                self.retries += 1
                return
            except KVTransportError as error:
                self.failure = describe(error)
                return
            self.posted += 1

    def _collect(self) -> int:
        """Take finished transfers out of the window, in any order."""
        self.agent.poll()
        finished = [transfer for transfer in self._open if transfer.done]
        for transfer in finished:
            self._open.remove(transfer)
            self.done += 1
            self.nbytes += transfer.nbytes
            if transfer.state.value != "done" and self.failure is None:
                error = transfer.error
                state = {"type": transfer.state.value, "message": "no error"}
                self.failure = describe(error) if error else state
        return len(finished)
