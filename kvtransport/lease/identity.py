"""Who an engine is, and whether two engines may exchange KV."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvtransport.errors import ConfigError, IncompatiblePeerError


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's name, its incarnation and what must agree with its peers.

    ``incarnation`` is fresh at each start.  ``fingerprint`` maps a fact's name
    (model, weights revision, dtype, KV geometry, ...) to its value; two engines
    exchange KV only if both mappings are equal.  ``versions`` lists the software
    that touches the wire; it is shown, not compared.
    """

    engine_id: str
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        if not 0 < len(self.engine_id) <= 256:
            raise ConfigError(f"engine_id must have 1 to 256 characters, not {self.engine_id!r}")
        for name in ("fingerprint", "versions"):
            facts = {str(key): str(value) for key, value in getattr(self, name).items()}
            too_long = [k for k, v in facts.items() if len(k) > 256 or len(v) > 4096]
            if too_long or len(facts) > 256:
                raise ConfigError(f"{name}: too many or too long entries {too_long}")
            object.__setattr__(self, name, MappingProxyType(facts))

    def fingerprint_bytes(self) -> bytes:
        """The fingerprint in one canonical form, for ``chain_seed``."""
        parts = []
        for key in sorted(self.fingerprint):
            for text in (key, self.fingerprint[key]):
                raw = text.encode()
                parts.append(len(raw).to_bytes(4, "little") + raw)
        return b"".join(parts)


def compare(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise ``IncompatiblePeerError`` naming the first field that differs and both values."""
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        a, b = mine.get(name), theirs.get(name)
        if a != b:
            raise IncompatiblePeerError(
                f"{name} differs: mine {_shown(a)}, theirs {_shown(b)}; KV can't be exchanged"
            )


def _shown(value: str | None) -> str:
    return "(missing)" if value is None else repr(value)
