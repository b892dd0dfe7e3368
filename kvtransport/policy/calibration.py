"""The calibration file: what was learned survives a restart.

Writing happens in a thread of its own and replaces the file as a whole.  A file
that can't be read, belongs to another model or makes no sense is left alone
until the next save, and the policy starts cold; nothing here ever raises.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

logger = logging.getLogger("kvtransport.policy.calibration")

MAX_NBYTES = 8 * 2**20
VERSION = 1


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Samples as rows of three numbers: steps, and transfers by peer."""

    version: int
    identity: str
    chunk_tokens: int
    steps: list[list[float]]
    transfers: dict[str, list[list[float]]]


class CalibrationFile:
    """Loads and saves ``State``; with an empty path it does neither."""

    def __init__(self, path: str, identity: str) -> None:
        self._path = Path(path) if path else None
        self._identity = identity
        self._queue: SimpleQueue[State | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def used(self) -> bool:
        return self._path is not None

    def load(self) -> State | None:
        """What was saved for the same identity, else ``None``."""
        if self._path is None:
            return None
        try:
            if self._path.stat().st_size > MAX_NBYTES:
                raise ValueError(f"larger than {MAX_NBYTES} bytes")  # noqa: TRY301
            state = msgspec.json.decode(self._path.read_bytes(), type=State)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            logger.warning("calibration not used: file=%s error=%s", self._path, error)
            return None
        if state.version != VERSION or state.identity != self._identity:
            logger.warning("calibration not used: file=%s is of another engine", self._path)
            return None
        return state

    def save(self, state: State) -> None:
        """Write soon, without waiting."""
        if self._path is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="kvt-calibration", daemon=True
            )
            self._thread.start()
        self._queue.put(state)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is waiting."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _write_all(self) -> None:
        while (state := self._latest()) is not None:
            self._write(state)

    def _latest(self) -> State | None:
        """The next state to write; older ones that wait are skipped."""
        state = self._queue.get()
        while state is not None:
            try:
                newer = self._queue.get_nowait()
            except Empty:
                return state
            if newer is None:
                self._queue.put(None)
                return state
            state = newer
        return None

    def _write(self, state: State) -> None:
        assert self._path is not None
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            draft.write_bytes(msgspec.json.encode(state))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("calibration not saved: file=%s error=%s", self._path, error)
