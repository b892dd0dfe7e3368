# ruff: noqa: N802, N815  # NIXL's own names
"""Finding NIXL's Python module and giving its untyped objects types.

The binding layer is used directly: NIXL's convenience class releases transfers
in flight when an object is collected, prints on creation, and fixes the
progress thread's delay to 0, which keeps one core busy per idle agent.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import BackendUnavailableError

Rows = NDArray[np.uint64]
"""Descriptors: n rows of (address, bytes, device id), or of (address, bytes,
device id, stride, count) for a strided table.  C-contiguous."""


class Status(Protocol):
    """A NIXL status; only its identity and name matter."""

    @property
    def name(self) -> str: ...


class DescriptorList(Protocol):
    """An opaque NIXL descriptor list."""


class NativeConfig(Protocol):
    """``nixlAgentConfig``."""

    useProgThread: bool
    useListenThread: bool
    pthrDelay: int
    syncMode: object


class NativeAgent(Protocol):
    """The methods of ``nixlAgent`` that the engine calls.

    Handles are plain integers: nothing is released behind the engine's back.
    Every method raises one of the module's exceptions on a negative status.
    """

    def createBackend(self, plugin: str, params: Mapping[str, str], /) -> int: ...
    def getAvailPlugins(self) -> list[str]: ...
    def getBackendParams(self, backend: int, /) -> tuple[dict[str, str], list[str]]: ...
    def registerMem(self, rows: DescriptorList, backends: Sequence[int], /) -> Status: ...
    def deregisterMem(self, rows: DescriptorList, backends: Sequence[int], /) -> Status: ...
    def getLocalPartialMD(
        self, rows: DescriptorList, with_connection: bool, backends: Sequence[int], /
    ) -> bytes: ...
    def loadRemoteMD(self, metadata: bytes, /) -> bytes: ...
    def invalidateRemoteMD(self, name: str, /) -> Status: ...
    def makeConnection(self, name: str, backends: Sequence[int], /) -> Status: ...
    def prepXferDlist(
        self, name: str, mem: object, rows: Rows, backends: Sequence[int], /
    ) -> int: ...
    def releasedDlistH(self, handle: int, /) -> Status: ...
    def makeXferReq(
        self,
        op: object,
        local: int,
        local_indices: NDArray[np.int32],
        remote: int,
        remote_indices: NDArray[np.int32],
        notify: bytes,
        backends: Sequence[int],
        skip_merge: bool,
        /,
    ) -> int: ...
    def createXferReq(
        self,
        op: object,
        local: DescriptorList,
        remote: DescriptorList,
        name: str,
        notify: bytes,
        backends: Sequence[int],
        /,
    ) -> int: ...
    def postXferReq(self, handle: int, notify: bytes, /) -> Status: ...
    def getXferStatus(self, handle: int, /) -> Status: ...
    def releaseXferReq(self, handle: int, /) -> Status: ...
    def getNotifs(
        self, known: dict[str, list[bytes]], backends: Sequence[int], /
    ) -> dict[str, list[bytes]]: ...


@dataclass(frozen=True, slots=True)
class Driver:
    """A loaded NIXL module; ``bindings`` is its C extension."""

    module: str
    bindings: Any

    def new_agent(self, name: str, *, progress_thread: bool, progress_delay_us: int) -> NativeAgent:
        """Create an agent without any plugin.

        ``progress_delay_us`` is how long NIXL's progress thread sleeps without
        an event before it looks again.
        """
        native: NativeConfig = self.bindings.nixlAgentConfig()
        native.useProgThread = progress_thread
        native.useListenThread = False
        native.pthrDelay = progress_delay_us
        # The contract allows one call at a time, so NIXL needs no lock of its own.
        native.syncMode = self.bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        agent: NativeAgent = self.bindings.nixlAgent(name, native)
        return agent

    def segment(self, kind: str) -> object:
        """NIXL's memory type for one of our kinds: host memory or any device's."""
        mem: object = self.bindings.DRAM_SEG if kind == "host" else self.bindings.VRAM_SEG
        return mem

    def transfer_list(self, kind: str, rows: Rows) -> DescriptorList:
        rows_list: DescriptorList = self.bindings.nixlXferDList(self.segment(kind), rows)
        return rows_list

    def region_list(self, kind: str, rows: Rows) -> DescriptorList:
        rows_list: DescriptorList = self.bindings.nixlRegDList(self.segment(kind), rows)
        return rows_list

    def empty_region_list(self) -> DescriptorList:
        rows_list: DescriptorList = self.bindings.nixlRegDList(self.bindings.DRAM_SEG, 0)
        return rows_list


def find_driver(module: str) -> str | None:
    """The installed version of ``module``, or None; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # built from source and put on the path


def load_driver(module: str, hint: str) -> Driver:
    """Import NIXL's bindings; raises ``BackendUnavailableError`` with ``hint``."""
    raise_exceptions = logging.raiseExceptions
    try:
        bindings = importlib.import_module(f"{module}._bindings")
    except ImportError as error:
        raise BackendUnavailableError(
            f"the Python module {module} cannot be imported: {error}", hint=hint
        ) from error
    finally:
        # NIXL's package turns off every logging handler's error reports.
        logging.raiseExceptions = raise_exceptions
    return Driver(module, bindings)
