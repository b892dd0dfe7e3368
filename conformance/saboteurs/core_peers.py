"""Saboteurs of the core: metadata, peers, threads and the end of an agent."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from kvtransport import metadata
from kvtransport.backend import Blocks, Op
from kvtransport.errors import (
    IncompatiblePeerError,
    KVTransportError,
    MalformedMetadataError,
    PeerLostError,
    StaleDescriptorError,
)
from kvtransport_conformance.saboteurs.base import (
    BrokenBackend,
    BrokenCore,
    always,
    patches,
    saboteur,
)

# Metadata and peers -------------------------------------------------------------------


def _hide_versions(original: Any) -> Any:
    def open_metadata(blob: bytes) -> Any:
        try:
            return original(blob)
        except IncompatiblePeerError:
            raise MalformedMetadataError("cannot read it") from None

    return open_metadata


@saboteur("MD-03")
class HidesVersions(BrokenCore):
    """Calls another version's metadata malformed."""

    patches = patches(opened=("kvtransport.peers:open_metadata", _hide_versions))


@saboteur("MD-04")
class IgnoresFingerprint(BrokenCore):
    """Imports peers with another model's fingerprint."""

    patches = patches(
        compatible=(
            "kvtransport.peers:check_compatible",
            lambda original: lambda header, wire, _ours: original(header, wire, header.fingerprint),
        ),
    )


class FollowsTheNewest(BrokenBackend):
    """Sends what is meant for a peer that is gone to the newest one, guessing the region."""

    def __init__(self) -> None:
        super().__init__()
        self._newest = 0

    def import_peer(self, peer_id: int, body: bytes) -> None:
        self.inner.import_peer(peer_id, body)
        self._newest = max(self._newest, peer_id)

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        try:
            self.inner.post(ticket, op, peer_id, blocks, notify)
        except (PeerLostError, StaleDescriptorError):
            for guess in (0, 1, 2):
                moved = replace(blocks, remote_region=blocks.remote_region + guess)
                with contextlib.suppress(StaleDescriptorError):
                    self.inner.post(ticket, op, self._newest, moved, notify)
                    return
            raise


@saboteur("MD-05", "PD-04", backend=FollowsTheNewest)
class TrustsStaleHandles(BrokenCore):
    """Takes a region of a former registration or incarnation for the present one."""

    patches = patches(
        knows=("kvtransport.peer:Peer.knows", always(True)),
        usable=("kvtransport.peer:Peer.check_usable", always(None)),
        current=("kvtransport.plan:Plan.check_current", always(None)),
        known=("kvtransport.peers:PeerTable.check_known", always(None)),
    )


def _always_new(original: Any) -> Any:
    def add(self: Any, blob: bytes) -> Any:
        with contextlib.suppress(KVTransportError):
            self._by_name.pop(metadata.open_metadata(blob)[0].name, None)
        return original(self, blob)

    return add


@saboteur("MD-06", "MD-07")
class NewPeerEveryTime(BrokenCore):
    """Makes a new peer of the same metadata."""

    patches = patches(add=("kvtransport.peers:PeerTable.add", _always_new))


@saboteur("MD-08", perhaps=["TD-08"])
class RemovesNobody(BrokenCore):
    """Goes on working with a removed peer."""

    def remove_peer(self, peer: Any, drain_s: float | None = None) -> None:
        del peer, drain_s


@saboteur("MD-12")
class ForgetsOldFormat(BrokenCore):
    """Cannot decode what an older release wrote any more."""

    patches = patches(
        decoded=(
            "kvtransport.metadata:open_metadata",
            lambda original: lambda blob: _refuse_old(original(blob)),
        ),
    )


def _refuse_old(found: Any) -> Any:
    if found[0].name.startswith("gold"):
        raise MalformedMetadataError("field 5 is missing")
    return found


# Threads, fork, close -------------------------------------------------------------------


@saboteur("CON-02")
class NoLock(BrokenCore):
    """Lets several threads into the backend at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        nothing: Any = _NoLock()
        self._lock = nothing
        self._posting._lock = nothing  # noqa: SLF001  # the fault goes to the heart


class _NoLock:
    """Looks like a lock."""

    def __enter__(self) -> None:
        """Lock nothing."""

    def __exit__(self, *_: object) -> None:
        """Unlock nothing."""


@saboteur("CON-09")
class SurvivesFork(BrokenCore):
    """Works on in a forked child."""

    patches = patches(fork=("kvtransport.gate:Gate.check_fork", always(None)))


@saboteur("NTF-10", "PD-03", "TD-02")
class ClosesAtOnce(BrokenCore):
    """Closes without waiting for what is in flight, and without saying so."""

    patches = patches(
        release=("kvtransport.agent:drain_until", always(None)),
        quarantine=("kvtransport.inflight:InFlight.quarantine", always(None)),
    )


class TruncatesMessages(BrokenBackend):
    """Cuts long messages to the limit."""

    def post(self, ticket: int, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None) -> None:
        cut = None if notify is None else notify[: 64 * 1024]
        self.inner.post(ticket, op, peer_id, blocks, cut)


@saboteur("NTF-05", backend=TruncatesMessages)
class SendsOversize(BrokenCore):
    """Accepts a message that is too long and sends its beginning."""

    patches = patches(check=("kvtransport.posting:Posting._check_notify", always(None)))
