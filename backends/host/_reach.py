"""Choosing how a peer is reached, and proving that it works before it is used."""

from __future__ import annotations

import logging

from kvtransport.errors import IncompatiblePeerError, PeerLostError
from kvtransport_backends.host._body import Body
from kvtransport_backends.host._channel import connect
from kvtransport_backends.host._identity import mismatch, own_identity
from kvtransport_backends.host._lane import Lane, Shared
from kvtransport_backends.host._vm import VmMemory, VmRefusedError

_log = logging.getLogger("kvtransport.backends.host")


def reach(peer_id: int, body: Body, shared: Shared) -> Lane:
    """A lane to a peer whose memory was read or whose token was proved.

    Raises ``IncompatiblePeerError``, ``PeerLostError`` or
    ``HandshakeTimeoutError``; nothing is left open then.
    """
    path = shared.config.path
    vm = None
    if path != "tcp":
        try:
            vm = _memory_of(body)
        except VmRefusedError as error:
            if path == "vm":
                raise _explicit(error) from error
            # Between machines that is normal; on one machine it costs speed.
            level = logging.WARNING if error.same_machine else logging.DEBUG
            _log.log(level, "host peer %d is reached over TCP: %s", peer_id, error)
    channel = None if vm else connect(body, shared.own, shared.config, try_local=False)
    shared.counters.add("peers_vm" if vm else "peers_tcp")
    return Lane(peer_id, body, vm, channel, shared)


def _memory_of(body: Body) -> VmMemory:
    if body.vm is None:
        raise VmRefusedError("its option path is tcp, ours would read its memory")
    identity = body.vm.identity
    reason, gone = mismatch(identity, own_identity())
    if reason:
        raise VmRefusedError(reason, gone=gone)
    return VmMemory(identity.pid, body.vm.guard_address, body.agent_id)


def _explicit(error: VmRefusedError) -> IncompatiblePeerError | PeerLostError:
    if error.gone:
        return PeerLostError(f"the peer is gone: {error}", backend="host")
    return IncompatiblePeerError(
        f'the peer\'s memory cannot be read: {error}. path is "vm"; "auto" would use TCP',
        backend="host",
    )
