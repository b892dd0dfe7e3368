"""The contract between the core and a backend, on one page.

Architecture
    ``Agent`` (``kvtransport.agent``) is what users call.  It validates,
    bounds-checks, merges and keeps lifetimes, then calls one ``Backend``.
    A backend moves bytes and reports events; it knows nothing of leases,
    policies or engines.  A *layer* is a backend that wraps another one.

Identity
    The core chooses every id: ``region_id`` (never reused within an agent),
    ``peer_id`` (one per imported incarnation of a remote agent) and ``ticket``
    (one per transfer).  A remote region is named by the *remote* agent's
    ``region_id``; a backend carries whatever keys that needs in ``export``.

Lifetime
    The core deregisters a region only when no transfer uses it, and keeps the
    buffer of a region alive until ``deregister`` returned.  A completion means
    **quiet**: after it nothing of that transfer can land or be read.  A backend
    that cannot promise this reports nothing; the core then quarantines the
    memory after its deadline.

Threading
    One call at a time, from any thread, unless ``capabilities.threading`` is
    ``"concurrent"``.  No method may block longer than a few milliseconds
    except ``open``, ``import_peer`` and ``close``, which take a deadline from
    their configuration.  Backends never call user code.

Errors
    Every error a backend raises or puts in an event is a ``KVTransportError``;
    driver exceptions are translated at this edge and kept in ``native``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvtransport.capabilities import Capabilities
from kvtransport.errors import KVTransportError

API_VERSION = 1
"""Version of this contract; checked when a backend is loaded."""


class Op(Enum):
    """Direction of a one-sided transfer, as seen from the posting side."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """Local memory to register.

    ``address`` is valid for ``nbytes`` bytes as long as ``owner`` lives.
    ``kind`` is ``"host"``, ``"cuda"``, ``"rocm"``, ``"neuron"`` or a vendor's
    own word; ``device`` is the device's index and 0 for host memory.
    ``access`` is what *peers* may do with the region.
    """

    region_id: int
    address: int
    nbytes: int
    kind: str = "host"
    device: int = 0
    access: frozenset[Literal["read", "write"]] = frozenset({"read", "write"})
    owner: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The descriptors of one transfer, already validated and merged.

    Five vectors of equal length n >= 1 (n = 0 only for a post with ``notify``, a
    message without data): descriptor ``i`` moves ``nbytes[i]``
    bytes between ``local_offset[i]`` in local region ``local_region[i]`` and
    ``remote_offset[i]`` in the peer's region ``remote_region[i]``.  Regions are
    int64, offsets and lengths uint64, all C-contiguous.
    """

    local_region: NDArray[np.int64]
    local_offset: NDArray[np.uint64]
    remote_region: NDArray[np.int64]
    remote_offset: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class Completion:
    """A transfer is terminal and quiet; ``error`` is None when it succeeded.

    ``cancelled`` is set when the cause was ``cancel``.
    """

    ticket: int
    error: KVTransportError | None = None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Notification:
    """A message from ``peer_id`` whose transfer's data is visible here."""

    peer_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The backend learned that a peer is gone; its transfers end separately."""

    peer_id: int
    error: KVTransportError


Event = Completion | Notification | PeerDown


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can run here, found out without touching hardware.

    ``details`` are shown to people.  One key has a meaning: ``listens`` says on
    what a backend listens that can't be told to stay on loopback.
    """

    available: bool
    reason: str = ""
    hint: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the entry point ``kvtransport.backends`` names.

    ``load`` imports the driver's wrapper lazily and returns the class;
    ``config`` is a frozen dataclass whose fields are the backend's options.
    ``wire`` names protocol family and version: two agents exchange data only
    when theirs are equal.
    """

    name: str
    summary: str
    config: type[Any]
    load: Callable[[], type[Backend]]
    wire: str
    api_version: int = API_VERSION
    install_hint: str = ""


class Backend(ABC):
    """Moves bytes between registered regions of two processes."""

    info: ClassVar[BackendInfo]

    @classmethod
    @abstractmethod
    def probe(cls, config: Any) -> Probe:
        """Say whether the backend can run here; import nothing heavy, open nothing."""

    @classmethod
    @abstractmethod
    def capabilities(cls, config: Any) -> Capabilities:
        """Declare what the backend can do under ``config``; a pure function."""

    @abstractmethod
    def open(self, name: str, config: Any) -> None:
        """Acquire the device under a unique agent ``name``.

        Raises ``BackendUnavailableError`` when the driver, the device or its
        required environment is missing; nothing is left open then.
        """

    @abstractmethod
    def register(self, region: RegionSpec) -> None:
        """Make ``region`` reachable by peers.

        Raises ``RegistrationError`` or ``UnsupportedError`` (memory kind);
        nothing stays registered then.
        """

    @abstractmethod
    def deregister(self, region_id: int) -> None:
        """Withdraw a region; no byte moves in or out after this returns."""

    @abstractmethod
    def export(self) -> bytes:
        """Everything a peer needs to reach the regions registered now."""

    @abstractmethod
    def import_peer(self, peer_id: int, body: bytes) -> None:
        """Learn a peer, or learn its newer export (same ``peer_id`` again).

        Raises ``MalformedMetadataError``, ``IncompatiblePeerError`` or
        ``PeerLostError``; the peer's former state stays then.
        """

    @abstractmethod
    def drop_peer(self, peer_id: int) -> None:
        """Forget a peer and everything mapped from it; no transfer uses it."""

    @abstractmethod
    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        """Start a transfer; its end is a ``Completion`` from ``poll``.

        Raises ``BackpressureError`` (nothing posted) or another error (nothing
        posted and nothing can land).
        """

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """Ask for an early end.  Its ``Completion`` still comes, once, when quiet.

        Raises ``UnsupportedError`` when ``capabilities.cancel`` is "none"; the
        transfer then goes on.  Unknown or finished tickets are ignored.
        """

    @abstractmethod
    def poll(self) -> Sequence[Event]:
        """Progress, then return what happened since the last call; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent, and it never raises."""

    def counters(self) -> Mapping[str, int]:
        """Driver or NIC counters named in ``capabilities.path_evidence``."""
        return {}
