"""Whose request it is, and which conversation: keyed digests, never the ids.

Every digest is keyed with the router's secret, so neither the affinity store
nor an engine learns a token or an id, and nobody can compute another tenant's
salt.  Ids are always scoped by tenant: the same conversation id from two
tenants gives two unrelated keys.
"""

from __future__ import annotations

import hashlib

Tenant = bytes

ANONYMOUS: Tenant = b""
_SIZE = 16


class Keyring:
    """The digests that the router makes; immutable, usable from any thread."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"kvt-router-key").digest()

    def tenant(self, value: bytes) -> Tenant:
        """The tenant that ``value`` (a token, a user name) stands for."""
        return self._digest(b"kvt-tenant", value)

    def salt(self, tenant: Tenant, client_salt: str | None) -> str | None:
        """The ``cache_salt`` for both legs, or None for a request without either.

        Before the dot it is the tenant, which is what engines go by in quotas.
        Behind it, a client's own salt narrows sharing further; it can never lead
        into another tenant's cache, because the result is keyed.
        """
        name = "" if tenant == ANONYMOUS else self._digest(b"kvt-salt", tenant).hex()
        if client_salt is None:
            return name or None
        own = tenant.ljust(_SIZE, b"\x00") + client_salt.encode(errors="surrogatepass")
        return f"{name}.{self._digest(b'kvt-own-salt', own).hex()}"

    def conversation(self, tenant: Tenant, source: str, value: bytes) -> bytes:
        """The affinity key of an id that ``source`` gave."""
        label = source.encode()
        head = len(label).to_bytes(2) + label
        return self._digest(b"kvt-id", tenant.ljust(_SIZE, b"\x00") + head + value)

    def content(self, tenant: Tenant) -> hashlib.blake2b:
        """A running digest over a conversation's beginning, for that tenant."""
        running = hashlib.blake2b(key=self._key, digest_size=_SIZE, person=b"kvt-content")
        running.update(tenant.ljust(_SIZE, b"\x00"))
        return running

    def pseudonym(self, key: bytes) -> str:
        """What engines may know of a conversation: not its id, nor its key in the store."""
        return self._digest(b"kvt-pseudonym", key).hex()

    def _digest(self, person: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_SIZE, person=person).digest()
