"""The router's secret: what keys the digests of ids, tokens and salts."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from kvtransport.errors import ConfigError

SECRET_VARIABLE = "KVT_ROUTER_SECRET"  # noqa: S105 - the name of a variable

MIN_NBYTES = 16

logger = logging.getLogger("kvtransport.router")


def load_secret(path: str, *, shared: bool) -> bytes:
    """The configured secret, else a random one, with a warning of what that costs.

    ``shared`` says that other replicas are expected to know the same one.
    Raises as ``known_secret`` does.
    """
    known = known_secret(path)
    if known is not None:
        return known
    if shared:
        logger.warning(
            "no router secret: replicas with random ones share neither affinity nor KV; "
            "give all of them the same --secret-file or %s",
            SECRET_VARIABLE,
        )
    else:
        logger.warning(
            "no router secret: with a random one, KV that engines retain is not found again after"
            " a restart, and the engines' tenant_quotas do not apply; give --secret-file or %s",
            SECRET_VARIABLE,
        )
    return secrets.token_bytes(32)


def known_secret(path: str) -> bytes | None:
    """The secret from a file, else from the environment.

    Raises ConfigError when the file can't be read or has too few bytes.
    """
    if path:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--secret-file {path!r} can't be read: {error}") from error
    else:
        secret = os.environ.get(SECRET_VARIABLE, "").encode(errors="surrogateescape")
        if not secret:
            return None
    if len(secret) < MIN_NBYTES:
        raise ConfigError(
            f"the router secret has {len(secret)} bytes; give at least {MIN_NBYTES}"
            " random ones (head -c 32 /dev/urandom | base64)"
        )
    return secret
