"""The router's secret: what keys the digests of ids, tokens and salts."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from kvtransport.errors import ConfigError

SECRET_VARIABLE = "KVT_ROUTER_SECRET"  # noqa: S105 - the name of a variable

logger = logging.getLogger("kvtransport.router")


def load_secret(path: str, *, shared: bool) -> bytes:
    """The configured secret, else a random one.

    ``shared`` says that other replicas are expected to know the same one; a
    random one then gets a warning.  Raises as ``known_secret`` does.
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
    return secrets.token_bytes(32)


def known_secret(path: str) -> bytes | None:
    """The secret from a file, else from the environment.

    Raises ConfigError when the file can't be read.
    """
    if path:
        try:
            return Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--secret-file {path!r} can't be read: {error}") from error
    given = os.environ.get(SECRET_VARIABLE, "")
    return given.encode(errors="surrogateescape") if given else None
