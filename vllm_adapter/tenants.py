"""Whose KV it is: the name that quotas and status pages have for a tenant.

A tenant is the part of ``cache_salt`` before the first dot; what follows may
divide it further.  Where nothing stands there, it is nobody in particular.

A salt opens the way to the KV computed with it, so nothing shows one:
configurations and status pages have its digest, the *label*.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from kvtransport.errors import ConfigError

_LABEL = re.compile(r"[0-9a-f]{12}")


def label(salt: str | None) -> str:
    """12 hex digits for the tenant of a ``cache_salt``; empty when there is none."""
    tenant = salt.partition(".")[0] if salt else ""
    if not tenant:
        return ""
    return hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def check_quotas(quotas: object) -> None:
    """Refuse names that no tenant can have; ``ConfigError`` says how to get the right one."""
    for name in quotas if isinstance(quotas, Mapping) else ():
        if name and (not isinstance(name, str) or not _LABEL.fullmatch(name)):
            msg = (
                f"retention_config.tenant_quotas[{name!r}]: tenants are named by 12 hex digits,"
                " which `kvt tenant salt` or `kvt tenant client` prints; those without a salt by"
                " an empty name"
            )
            raise ConfigError(msg)
