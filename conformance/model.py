"""A random mixture of operations against a model of what memory must hold."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtransport_conformance.context import BLANK, LATE_S, Ranges
from kvtransport_conformance.patterns import Pattern

if TYPE_CHECKING:
    from kvtransport_conformance.context import Context, Scene

SIZE = 1 << 14
UNIT = 64


class ModelRun:
    """Both sides' buffers as numpy arrays beside the real ones.

    Every step is one of: transfer either way, refill a source, register and drop
    another region, renew the peer's metadata, compare.  The last steps are kept
    for the message of a failure.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._scene: Scene = ctx.scene(SIZE)
        self._key = 10
        self._extra = False
        self._model: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        for side, key in (("a", 1), ("b", 2)):
            self._model[side, "src"] = np.array(Pattern("coded", key).data(0, SIZE))
            self._model[side, "dst"] = np.array(BLANK.data(0, SIZE))
        self._steps: list[str] = []

    def run(self, steps: int) -> None:
        moves = [self._transfer] * 6 + [self._refill, self._churn, self._renew, self._compare]
        for _ in range(steps):
            moves[int(self._ctx.rng.integers(len(moves)))]()
        self._compare()

    def _transfer(self) -> None:
        rng, ctx = self._ctx.rng, self._ctx
        op = ctx.ops[int(rng.integers(len(ctx.ops)))]
        reverse = bool(rng.integers(2))
        count = int(rng.integers(1, 12))
        unit = max(UNIT, ctx.align)
        places = SIZE // unit
        source = rng.choice(places, count, replace=False) * unit
        at = rng.choice(places, count, replace=False) * unit
        sizes = rng.integers(1, unit // ctx.align + 1, count) * ctx.align
        self._steps.append(f"{op} reverse={reverse} {source} -> {at} {sizes}")
        self._scene.move(op, Ranges.of(source, at, sizes), reverse=reverse)
        from_b = (op == "read") != reverse
        origin, sink = ("b", "a") if from_b else ("a", "b")
        for start, to, size in zip(source, at, sizes, strict=True):
            data = self._model[origin, "src"][start : start + size]
            self._model[sink, "dst"][to : to + size] = data
        if op == "write" and not self._ctx.supports("completion"):
            self._await(sink)

    def _await(self, sink: str) -> None:
        """Give a write that is DONE before it is visible its moment."""
        until = time.monotonic() + LATE_S
        while time.monotonic() < until:
            found = np.frombuffer(self._side(sink).peek("dst", 0, SIZE), np.uint8)
            if np.array_equal(found, self._model[sink, "dst"]):
                return
            time.sleep(0.005)

    def _refill(self) -> None:
        name = "a" if self._ctx.rng.integers(2) else "b"
        self._key = self._key % 30_000 + 1
        self._steps.append(f"refill {name}.src with {self._key}")
        pattern = Pattern("random", self._key)
        self._side(name).fill("src", pattern.wire())
        self._model[name, "src"] = np.array(pattern.data(0, SIZE))

    def _churn(self) -> None:
        if not self._ctx.supports("dynamic_regions"):
            return
        self._steps.append("drop extra region" if self._extra else "register extra region")
        if self._extra:
            self._ctx.b.deregister("extra")
        else:
            self._ctx.b.register("extra", "src")
        self._extra = not self._extra

    def _renew(self) -> None:
        self._steps.append("renew metadata")
        self._ctx.a.add_peer(self._ctx.b.metadata())

    def _compare(self) -> None:
        for (name, buffer), want in self._model.items():
            found = np.frombuffer(self._side(name).peek(buffer, 0, SIZE), np.uint8)
            if not np.array_equal(found, want):
                wrong = np.flatnonzero(found != want)
                self._ctx.expect(
                    condition=False,
                    message=f"{name}.{buffer} differs from the model at byte {wrong[0]} "
                    f"({len(wrong)} bytes) after: {'; '.join(self._steps[-6:])}",
                )
        self._steps.append("compared")

    def _side(self, name: str) -> Any:
        return self._ctx.a if name == "a" else self._ctx.b
