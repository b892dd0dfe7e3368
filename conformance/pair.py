"""A worker and its peers, driven through one check at a time under a watchdog.

The pair relays the worker's requests to the peers and performs what only an
outside process can: starting, stopping and killing them.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtransport_conformance.procs import Child, Launch, Message

CLEANUP_S = 20.0


class ChildDied(Exception):  # noqa: N818  # an observation about the backend, not an error here
    """A process ended unasked; the message is its epitaph."""


class ChildHung(Exception):  # noqa: N818
    """A process did not answer by its deadline; the message holds its stacks."""


class ChildFailed(Exception):  # noqa: N818
    """An operation on the whole process raised; ``described`` is its error."""

    def __init__(self, described: Mapping[str, Any], traceback: str = "") -> None:
        super().__init__(f"{described['type']}: {described['message']}")
        self.described = described
        self.traceback = traceback


@dataclass(slots=True)
class Graded:
    """What both processes held after a check."""

    residue: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    moved: int = 0


class Pair:
    """Processes of one target: a worker, the shared peer, and extra peers of a check."""

    def __init__(
        self, launch: Launch, target: Mapping[str, Any], start_s: float,
        network: Callable[[str], bool | None],
    ) -> None:  # fmt: skip
        self._launch = launch
        self._network = network
        self._start_s = start_s
        self._target = target
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._waiting: dict[tuple[str, int], int] = {}
        self._numbers = 0
        self._outstanding = ""
        self.usable = True
        self.worker = Child("worker", launch, self._inbox, peer=False)
        self.peers = {"peer": Child("peer", launch, self._inbox, peer=True)}

    # Life -----------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Load the target on both sides; return the worker's facts and both identities.

        Raises ``ChildDied``, ``ChildHung`` or ``ChildFailed``.
        """
        both = (self.worker, self.peers["peer"])
        target = dict(self._target)
        numbers = [self._post(child, "init", target=target, role=child.name) for child in both]
        facts, other = (
            self._reply(child, number, "init", self._start_s)
            for child, number in zip(both, numbers, strict=True)
        )
        self.worker.identity = facts["process"]
        self.peers["peer"].identity = other["process"]
        return {**facts, "peer_process": other["process"], "peer_memory": other["memory"]}

    def on_both(self, op: str) -> None:
        """Run an operation of the whole process on both sides at once: warm_up, baseline."""
        both = (self.worker, self.peers["peer"])
        numbers = [self._post(child, op) for child in both]
        for child, number in zip(both, numbers, strict=True):
            self._reply(child, number, op, self._start_s)

    def end(self) -> None:
        self.usable = False
        for child in [self.worker, *self.peers.values()]:
            child.kill()
        for child in [self.worker, *self.peers.values()]:
            child.end()

    # One check --------------------------------------------------------------------------

    def run(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Let the worker run a check; return its verdict.

        Raises ``ChildDied`` or ``ChildHung``; the pair is of no use then.
        """
        deadline = time.monotonic() + timeout_s
        self.worker.send({"op": "run", **request})
        deaths: list[str] = []
        while True:
            message = self._next(deadline)
            if message.bad:
                deaths.append(f"{message.child.name} broke the protocol: {message.bad}")
            elif message.child is self.worker:
                if message.body is None:
                    self.usable = False
                    raise ChildDied(f"worker {self.worker.epitaph()}")
                if "result" in message.body:
                    return {**message.body["result"], "deaths": deaths}
                self._relay(message.body)
            elif message.body is None:
                deaths += self._bury(message.child)
            else:
                self._answer(message.child, message.body)

    def _next(self, deadline: float) -> Message:
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self.usable = False
            stacks = "\n".join(
                f"[{child.name}] {child.stacks()}"
                for child in [self.worker, *self.peers.values()]
                if not child.ended
            )
            raise ChildHung(f"{self._outstanding or 'worker is busy'}\n{stacks}") from None

    def _relay(self, body: dict[str, Any]) -> None:
        """Pass a worker's request on, or do it ourselves."""
        number, to = body["id"], body["to"]
        if to == "controller":
            try:
                reply = {"id": number, "ok": self._serve(body["op"], body["args"])}
            except (ChildDied, ChildHung, ChildFailed) as error:
                reply = {"id": number, "lost": str(error)}
            self.worker.send(reply)
            return
        child = self.peers.get(to)
        if child is None or child.ended:
            self.worker.send({"id": number, "lost": f"{to} is not running"})
            return
        self._numbers += 1
        self._waiting[to, self._numbers] = number
        self._outstanding = f"waiting for {to}: {body['op']}"
        if not child.send({**body, "id": self._numbers}):
            del self._waiting[to, self._numbers]
            self.worker.send({"id": number, "lost": f"{to} takes no requests"})

    def _answer(self, child: Child, body: dict[str, Any]) -> None:
        number = self._waiting.pop((child.name, body.get("id", 0)), None)
        if number is not None:
            self._outstanding = ""
            self.worker.send({**body, "id": number})

    def _bury(self, child: Child) -> list[str]:
        """A peer is gone: tell whoever waits for it; return its death if it was unasked."""
        child.ended = True
        for (name, inner), number in list(self._waiting.items()):
            if name == child.name:
                del self._waiting[name, inner]
                self.worker.send({"id": number, "lost": f"{child.name} is gone"})
        return [] if child.asked_to_end else [f"{child.name} {child.epitaph()}"]

    # Requests of the worker to the controller ----------------------------------------------

    def _serve(self, op: str, args: Mapping[str, Any]) -> Any:
        if op == "spawn":
            return self._spawn(args["process"])
        if op == "network":
            return self._network(args["fault"])
        child = self.peers[args["process"]]
        if op == "leave":
            return self._leave(child, float(args["patience_s"]))
        if op == "signal":
            return self._signal(child, args["name"])
        raise ChildFailed({"type": "ValueError", "message": f"no controller operation {op!r}"})

    def _spawn(self, name: str) -> None:
        if name in self.peers:  # the dead one that this one takes over from
            self.peers.pop(name).end()
        child = Child(name, self._launch, self._inbox, peer=True)
        self.peers[name] = child
        target = dict(self._target)
        facts = self._ask(child, "init", self._start_s, target=target, role=name)
        child.identity = facts["process"]

    @staticmethod
    def _signal(child: Child, name: str) -> None:
        number = signal.Signals[f"SIG{name}"]
        child.asked_to_end |= number is signal.SIGKILL
        child.signal(number)
        child.await_state({"KILL": "ZX", "STOP": "T", "CONT": "RSD"}[name])

    @staticmethod
    def _leave(child: Child, patience_s: float) -> dict[str, Any]:
        child.asked_to_end = True
        started = time.monotonic()
        child.send({"op": "leave", "id": 0})
        code = child.exit_code(patience_s)
        took = time.monotonic() - started
        if code is None:
            child.kill()
        return {"code": code, "seconds": round(took, 3), "words": child.last_words()}

    def _ask(self, child: Child, op: str, patience_s: float, **args: Any) -> Any:
        """Ask one process outside a check."""
        return self._reply(child, self._post(child, op, **args), op, patience_s)

    def _post(self, child: Child, op: str, **args: Any) -> int:
        self._numbers += 1
        child.send({"op": op, "id": self._numbers, "args": args})
        return self._numbers

    def _reply(self, child: Child, number: int, op: str, patience_s: float) -> Any:
        """Wait for one process's answer; other processes' messages are kept for later."""
        deadline = time.monotonic() + patience_s
        put_back: list[Message] = []
        try:
            while True:
                message = self._wait_for(child, op, deadline)
                if message.child is not child:
                    put_back.append(message)
                elif message.bad:
                    continue  # not ours: the protocol's answer is still to come
                elif message.body is None:
                    self.usable = False
                    raise ChildDied(f"{child.name} {child.epitaph()}")
                elif message.body.get("id") != number:
                    continue  # an answer that a failed check did not wait for
                elif "error" in message.body:
                    raise ChildFailed(message.body["error"], message.body.get("traceback", ""))
                else:
                    return message.body.get("ok")
        finally:
            for message in put_back:
                self._inbox.put(message)

    def _wait_for(self, child: Child, op: str, deadline: float) -> Message:
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self.usable = False
            raise ChildHung(f"{child.name} did not finish {op}\n{child.stacks()}") from None

    # After a check ----------------------------------------------------------------------------

    def grade(self) -> Graded:
        """Clean up in every living process and collect what stayed behind.

        Raises ``ChildDied``, ``ChildHung`` or ``ChildFailed``.
        """
        total = Graded()
        # Extra peers were not warmed up, so what they hold says nothing; they just end.
        shared = self.peers["peer"]
        both = [self.worker] if shared.ended or shared.asked_to_end else [self.worker, shared]
        # Logs first: an orderly end of one side is a lost peer to the other.
        for child in both:
            logs = self._ask(child, "logs", CLEANUP_S)
            total.logs += [f"{child.name}: {text}" for text in logs]
        for child in both:
            found = self._ask(child, "grade", CLEANUP_S)
            total.residue += [f"{child.name}: {text}" for text in found["residue"]]
            total.complaints += [f"{child.name}: {text}" for text in found["complaints"]]
            total.moved += found["moved"]
            for key, value in found["counters"].items():
                total.counters[key] = total.counters.get(key, 0) + value
        self._end_extra_peers()
        self.usable = self.usable and not total.residue and len(both) == 2
        return total

    def _end_extra_peers(self) -> None:
        for name in [name for name in self.peers if name != "peer"]:
            self.peers.pop(name).end()
