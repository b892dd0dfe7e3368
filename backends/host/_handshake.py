"""How two agents prove to each other that they hold the right tokens.

The serving side speaks first.  Neither token travels: each proof is a keyed
hash over both sides' fresh random bytes.  A wrong proof is what a client sees
when another agent, for example a restarted one, now listens at the address.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass

from kvtransport.errors import HandshakeTimeoutError, KVTransportError, PeerLostError

_MAGIC = b"KVTHOST1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
_REPLY = struct.Struct("<16s16s32s32sQ")
REPLY_BYTES = _REPLY.size


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Who an agent is; ``guard_address`` is 0 unless its memory may be read."""

    agent_id: bytes
    token: bytes
    guard_address: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Caller:
    """A client that proved our token; its claimed id still needs ``proves``."""

    agent_id: bytes
    guard_address: int
    challenge: bytes
    own_proof: bytes

    def proves(self, token: bytes) -> bool:
        """Whether the caller also holds the token of the agent it claims to be."""
        return hmac.compare_digest(self.own_proof, _proof(token, b"self", self.challenge))


def _proof(token: bytes, role: bytes, *parts: bytes) -> bytes:
    message = role + b"".join(parts)
    return hashlib.blake2b(message, key=token, digest_size=_PROOF_BYTES).digest()


class ServerHandshake:
    """The serving side of one connection; pure, the listener moves the bytes."""

    def __init__(self, own: Credentials) -> None:
        self._own = own
        self._challenge = os.urandom(_NONCE_BYTES)

    def greeting(self) -> bytes:
        return _MAGIC + self._challenge

    def accept(self, reply: bytes) -> tuple[Caller, bytes] | None:
        """Who called and what to answer, or None when the proof is wrong."""
        agent_id, nonce, proof, own_proof, guard = _REPLY.unpack(reply)
        expected = _proof(self._own.token, b"client", self._challenge, nonce)
        if not hmac.compare_digest(proof, expected):
            return None
        answer = _proof(self._own.token, b"server", self._challenge, nonce)
        return Caller(agent_id, guard, self._challenge, own_proof), answer


def call(sock: socket.socket, own: Credentials, peer_token: bytes, timeout_s: float) -> None:
    """Run the client side on a connected socket.

    Raises ``HandshakeTimeoutError`` or ``PeerLostError``.
    """
    end = time.monotonic() + timeout_s
    try:
        greeting = _receive(sock, GREETING_BYTES, end)
        challenge = greeting[len(_MAGIC) :]
        if not greeting.startswith(_MAGIC):
            raise _stranger()
        nonce = os.urandom(_NONCE_BYTES)
        proof = _proof(peer_token, b"client", challenge, nonce)
        own_proof = _proof(own.token, b"self", challenge)
        sock.sendall(_REPLY.pack(own.agent_id, nonce, proof, own_proof, own.guard_address))
        answer = _receive(sock, _PROOF_BYTES, end)
    except KVTransportError:
        raise  # some of ours are OSErrors too
    except TimeoutError as error:
        raise HandshakeTimeoutError(
            f"the peer did not complete the handshake within {timeout_s:g} s", backend="host"
        ) from error
    except OSError as error:
        raise PeerLostError(
            "the peer refused the handshake: it was restarted, or has no free connection",
            backend="host",
            native=error,
        ) from error
    if not hmac.compare_digest(answer, _proof(peer_token, b"server", challenge, nonce)):
        raise PeerLostError("another agent answers at the peer's address", backend="host")


def _stranger() -> PeerLostError:
    return PeerLostError("something that is no host agent answers there", backend="host")


def _receive(sock: socket.socket, nbytes: int, end: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        sock.settimeout(max(end - time.monotonic(), 0.001))
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("closed during the handshake")
        data += part
    return data
