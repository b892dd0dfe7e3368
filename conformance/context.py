"""What a check function gets: two sides, a scene to move bytes in, and verdicts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtransport.errors import KVTransportError
from kvtransport.events import TransferEvent
from kvtransport_conformance import flags
from kvtransport_conformance.detour import Detour, through
from kvtransport_conformance.hub import CONTROLLER, Hub
from kvtransport_conformance.patterns import Expected, Overlay, Pattern
from kvtransport_conformance.process import Process
from kvtransport_conformance.sides import LocalSide, RemoteProcess, RemoteSide, Side

if TYPE_CHECKING:
    from kvtransport_conformance.registry import Check

BLANK = Pattern("const", 0xEE)
"""What destinations hold before a transfer."""

LATE_S = 3.0
"""How long after DONE a write may arrive when ``completion`` is "local"."""


class CheckFailed(AssertionError):  # noqa: N818  # a verdict, not an error of the suite
    """The property does not hold; the message says what was seen instead."""


class NotVerified(Exception):  # noqa: N818  # a verdict
    """Something that the check needs is not here."""


class NotSupported(Exception):  # noqa: N818  # a verdict
    """Declared absent, and refused where that can be seen."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes a person may change; they are recorded in the report."""

    soak_s: float = 20.0
    rounds: int = 10_000
    max_bytes: int = 64 << 20
    watch_s: float = 1.0
    """How long memory that must stay untouched is watched; some checks take twice that."""


class Context:
    """One run of one check.

    ``a`` is the worker's own side, ``b`` the shared peer's.  ``detail`` collects
    numbers for the report.  ``seed`` is unique to run and check.
    """

    def __init__(
        self, check: Check, caps: flags.Declared, seed: int, settings: Settings,
        process: Process, hub: Hub,
    ) -> None:  # fmt: skip
        self.check = check
        self.caps = caps
        self.seed = seed
        self.settings = settings
        self.process = process
        self.hub = hub
        self.rng = np.random.default_rng(seed)
        self.detail: dict[str, Any] = {}
        self.a = LocalSide("main", process)
        self.peer = RemoteProcess("peer", hub)
        self.b: RemoteSide = self.peer.side()

    # Verdicts --------------------------------------------------------------------

    def expect(self, condition: object, message: str) -> None:
        if not condition:
            raise CheckFailed(message)

    def same(self, side: Side, buffer: str, expected: Expected, what: str) -> None:
        """Expect the contents of a buffer, as its own process sees them.

        A backend whose writes are DONE before they are visible gets a moment.
        """
        wrong = side.mismatch(buffer, expected.wire())
        until = time.monotonic() + (0.0 if self.supports("completion") else LATE_S)
        while wrong and time.monotonic() < until:
            time.sleep(0.01)
            wrong = side.mismatch(buffer, expected.wire())
        if wrong:
            raise CheckFailed(f"{what}: {wrong}")

    def raises(
        self,
        kinds: type[Exception] | tuple[type[Exception], ...],
        call: Callable[[], Any],
        what: str,
    ) -> Exception:
        """Expect ``call`` to raise one of ``kinds``; return the error."""
        names = kinds.__name__ if isinstance(kinds, type) else " or ".join(
            kind.__name__ for kind in kinds
        )  # fmt: skip
        try:
            call()
        except kinds as error:
            return error
        except KVTransportError as error:
            raise CheckFailed(
                f"{what}: expected {names}, got {type(error).__name__}: {error}"
            ) from error
        raise CheckFailed(f"{what}: expected {names}, but it was accepted")

    def supports(self, key: str) -> bool:
        return flags.supports(self.caps, key)

    def until(self, condition: Callable[[], bool], patience_s: float, what: str) -> None:
        """Poll ``condition``, progressing the worker's agents; fails when time is up."""
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise CheckFailed(f"{what}: not within {patience_s:g} s")
            self.process.pump()
            time.sleep(0.001)

    def pause(self, seconds: float) -> None:
        """Let time pass while both sides keep progressing."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.process.pump()
            time.sleep(0.001)

    def pause_polling(self, seconds: float, seen: Counter[int]) -> None:
        """Let time pass and count the terminal events that still come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.a.station.agent.poll():
                if isinstance(event, TransferEvent):
                    seen[event.transfer.transfer_id] += 1
            time.sleep(0.001)

    # Processes and sides -----------------------------------------------------------

    def spawn(self, name: str) -> RemoteProcess:
        """Start one more peer process; it ends with the check."""
        self.hub.call(CONTROLLER, "spawn", None, {"process": name})
        return RemoteProcess(name, self.hub)

    def local(self, name: str) -> LocalSide:
        """One more agent in the worker."""
        return LocalSide(name, self.process)

    def fault(self, name: str) -> bool:
        """Cause a network fault by the run's namespaces or the target's hook; False without."""
        done = self.hub.call(CONTROLLER, "network", None, {"fault": name})
        if done is None:
            done = self.process.inject(name)
        return bool(done)

    @contextmanager
    def detour(self) -> Iterator[tuple[Detour, bytes] | None]:
        """A proxy in front of the shared peer, and the peer's metadata that leads through it.

        Yields None when the peer cannot be reached through one: its port is not
        in its metadata, or the data takes another path, which is tried first.
        """
        found = through(self.b.metadata(), self.peer.call("listeners"))
        if found is None:
            yield None
            return
        detour, blob = found
        try:
            yield found if self._leads_through(detour, blob) else None
        finally:
            detour.close()

    def _leads_through(self, detour: Detour, blob: bytes) -> bool:
        probe = self.local("proxy-probe")
        probe.alloc("probe", 4096, BLANK.wire())
        probe.register("probe")
        try:
            probe.add_peer(blob)
            remote = "dst" if self.op == "write" else "src"
            probe.move(self.op, [["probe", remote, [0], [0], [64]]], deadline_s=5.0)
        except KVTransportError:
            return False
        finally:
            probe.station.reset()
        return detour.forwarded > 64

    def connect(self, one: Side, other: Side, key: str = "peer", back: str = "peer") -> None:
        """Exchange metadata both ways; ``one`` knows ``other`` as ``key``."""
        mine, theirs = one.metadata(), other.metadata()
        one.add_peer(theirs, key)
        other.add_peer(mine, back)

    # Scenes ------------------------------------------------------------------------

    @property
    def ops(self) -> list[str]:
        """Declared operations; write first, because every backend of BASE has it."""
        return [op for op in ("write", "read") if op in self.caps["ops"]]

    @property
    def op(self) -> str:
        """The operation that direction-agnostic checks use."""
        return self.ops[0]

    def scene(
        self, nbytes: int = 1 << 16, *, one: Side | None = None, other: Side | None = None,
        key: str = "peer", back: str = "peer", kinds: Sequence[str] = ("", ""), skip: int = 0,
    ) -> Scene:  # fmt: skip
        """Two connected sides with a filled "src" and a blank "dst" each, registered."""
        one, other = one or self.a, other or self.b
        scene = Scene(self, one, other, nbytes, key, back)
        for side, number, kind in ((one, 1, kinds[0]), (other, 2, kinds[1])):
            side.alloc("src", nbytes, Pattern("coded", number).wire(), kind, skip)
            side.alloc("dst", nbytes, BLANK.wire(), kind, skip)
            side.register("src")
            side.register("dst")
        self.connect(one, other, key, back)
        return scene

    @property
    def align(self) -> int:
        return int(self.caps["min_align"])


@dataclass(frozen=True, slots=True)
class Ranges:
    """Vectors of source offsets, destination offsets and lengths, in bytes."""

    source: tuple[int, ...]
    at: tuple[int, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, source: Iterable[int], at: Iterable[int], nbytes: Iterable[int]) -> Ranges:
        vectors = (tuple(int(value) for value in vector) for vector in (source, at, nbytes))
        return cls(*vectors)

    @classmethod
    def whole(cls, nbytes: int) -> Ranges:
        return cls((0,), (0,), (nbytes,))

    @property
    def total(self) -> int:
        return sum(self.nbytes)


class Scene:
    """Moves bytes between two sides and knows what each buffer must hold."""

    def __init__(
        self, ctx: Context, one: Side, other: Side, nbytes: int, key: str, back: str
    ) -> None:
        self.ctx = ctx
        self.one = one
        self.other = other
        self.nbytes = nbytes
        self.key = key
        self.back = back

    def ends(self, op: str, *, reverse: bool = False) -> tuple[Side, Side, Side, Pattern]:
        """Initiator, source side, destination side and source pattern of a transfer."""
        initiator, target = (self.other, self.one) if reverse else (self.one, self.other)
        source, sink = (initiator, target) if op == "write" else (target, initiator)
        return initiator, source, sink, Pattern("coded", 1 if source is self.one else 2)

    @staticmethod
    def piece(op: str, ranges: Ranges, local: str = "", remote: str = "") -> list[Any]:
        """One piece of a transfer, in the initiator's words."""
        if op == "write":
            return [local or "src", remote or "dst", ranges.source, ranges.at, ranges.nbytes]
        return [local or "dst", remote or "src", ranges.at, ranges.source, ranges.nbytes]

    def move(self, op: str, ranges: Ranges, *, reverse: bool = False, **options: Any) -> Any:
        """Move ``ranges`` from a "src" to a "dst"; raises what went wrong."""
        initiator = self.ends(op, reverse=reverse)[0]
        key = self.back if reverse else self.key
        return initiator.move(op, [self.piece(op, ranges)], key, **options)

    def post(self, op: str, ranges: Ranges, *, reverse: bool = False, **options: Any) -> int:
        initiator = self.ends(op, reverse=reverse)[0]
        key = self.back if reverse else self.key
        number: int = initiator.post(op, [self.piece(op, ranges)], key, **options)
        return number

    def blank(self, op: str, *, reverse: bool = False) -> None:
        """Reset the destination."""
        self.ends(op, reverse=reverse)[2].fill("dst", BLANK.wire())

    def arrived(self, op: str, ranges: Ranges, what: str = "", *, reverse: bool = False) -> None:
        """Expect exactly ``ranges`` in the destination, and nothing else changed."""
        _, _, sink, pattern = self.ends(op, reverse=reverse)
        want = Expected(BLANK, (Overlay(pattern, ranges.at, ranges.source, ranges.nbytes),))
        self.ctx.same(sink, "dst", want, what or f"destination of the {op}")

    def untouched(self, op: str, what: str = "", *, reverse: bool = False) -> None:
        """Expect the destination to be as blank as before."""
        sink = self.ends(op, reverse=reverse)[2]
        self.ctx.same(sink, "dst", Expected(BLANK), what or f"destination of the {op}")

    def source_intact(self, op: str, *, reverse: bool = False) -> None:
        _, source, _, pattern = self.ends(op, reverse=reverse)
        self.ctx.same(source, "src", Expected(pattern), f"source of the {op}")


def error_text(result: Mapping[str, Any]) -> str:
    """Type and message of a transfer result's error, for messages."""
    error = result.get("error") or result.get("raised")
    return f"{error['type']}: {error['message']}" if error else "no error"
