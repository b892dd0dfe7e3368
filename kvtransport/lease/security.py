"""The cluster secret: keys for the control plane and signed addresses.

Everything is derived from one secret that all engines of a cluster share.  It
is stretched once with scrypt, because a passphrase may have been chosen by a
person.  Server and client keys are both derived, so each side knows the
other's public key and admits no other: without the secret nothing can be
asked and nothing is answered.

The secret is never logged and appears in no ``repr`` and no error message.
"""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b, scrypt
from pathlib import Path

import zmq
from zmq.utils import z85

from kvtransport.errors import AuthenticationError, ConfigError

SECRET_VARIABLE = "KVT_CLUSTER_SECRET"  # noqa: S105  # a variable's name, no secret
MIN_SECRET_NBYTES = 16

_SALT = b"kvtransport cluster secret 1"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pairs of the owner's socket and of its readers, Z85-coded."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """A secret of at least 16 bytes.  Compare and print it freely: it shows nothing."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) < MIN_SECRET_NBYTES:
            raise ConfigError(
                f"the cluster secret must have at least {MIN_SECRET_NBYTES} bytes;"
                " make one with: openssl rand -hex 32"
            )

    def key(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose."""
        return blake2b(purpose, key=_stretched(self.value), digest_size=32).digest()

    def curve_keys(self) -> CurveKeys:
        """Raises ``ConfigError`` when this libzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError(
                "a cluster secret is set, but this libzmq lacks CURVE; use pyzmq's wheel"
            )
        server, client = z85.encode(self.key(b"server")), z85.encode(self.key(b"client"))
        return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


@lru_cache(maxsize=8)
def _stretched(secret: bytes) -> bytes:
    return scrypt(secret, salt=_SALT, n=2**14, r=8, p=1, dklen=32)


def load_secret(path: str = "") -> ClusterSecret | None:
    """The cluster secret from a file, else from ``KVT_CLUSTER_SECRET``, else ``None``.

    Raises ``ConfigError`` when the file can't be read, is open to other users,
    or the secret is too short.
    """
    if not path:
        value = os.environ.get(SECRET_VARIABLE, "")
        return ClusterSecret(value.strip().encode()) if value.strip() else None
    try:
        mode = Path(path).stat().st_mode
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cluster_secret_file: {path}: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~stat.S_IRGRP:
        raise ConfigError(
            f"cluster_secret_file: {path} is open to other users"
            f" (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
        )
    return ClusterSecret(raw.strip())


def sign_address(secret: ClusterSecret, address: str) -> str:
    """A token with which holders of the secret trust ``address``."""
    state = blake2b(address.encode(), key=secret.key(b"address"), digest_size=16)
    return state.hexdigest()


def verify_address(secret: ClusterSecret, address: str, token: str) -> None:
    """Raise ``AuthenticationError`` unless this secret signed ``address``."""
    if not hmac.compare_digest(sign_address(secret, address).encode(), token.encode()):
        raise AuthenticationError("address token was not signed with this cluster's secret")
