"""The plan: which checks a run consists of, fixed before the first one starts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvtransport.errors import ConfigError
from kvtransport_conformance.profiles import PROFILES
from kvtransport_conformance.registry import Check, all_checks


@dataclass(frozen=True, slots=True)
class Plan:
    """``order`` is what runs when; ``checks`` what was promised."""

    checks: Mapping[str, Check]
    profiles: tuple[str, ...]
    seed: int

    @property
    def order(self) -> list[Check]:
        """A shuffled order that follows from the seed alone."""
        chosen = [self.checks[key] for key in sorted(self.checks)]
        random.Random(self.seed).shuffle(chosen)  # noqa: S311  # an order, not a secret
        return chosen

    @property
    def words(self) -> list[str]:
        """Options of ``kvt conformance run`` that choose this plan again."""
        if self.excluded:
            return ["--check", ",".join(sorted(self.checks))]
        usual = tuple(name for name, profile in PROFILES.items() if profile.default)
        return [] if self.profiles == usual else ["--profile", ",".join(self.profiles)]

    @property
    def excluded(self) -> dict[str, dict[str, str]]:
        """Checks of the named profiles that are not in the plan, with their levels."""
        return excluded(self.profiles, self.checks)

    @property
    def digest(self) -> str:
        return digest_of(self.checks.values())


def digest_of(checks: Iterable[Check]) -> str:
    """SHA-256 over ids and revisions."""
    lines = sorted(f"{check.id} {check.revision}" for check in checks)
    return f"sha256:{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def excluded(profiles: Collection[str], chosen: Collection[str]) -> dict[str, dict[str, str]]:
    """Checks that belong to ``profiles`` but were not chosen; they keep a profile partial."""
    return {
        key: {name: level for name, level in entry.profiles.items() if name in profiles}
        for key, entry in all_checks().items()
        if key not in chosen and not set(entry.profiles).isdisjoint(profiles)
    }


def make_plan(seed: int, profiles: Collection[str] = (), ids: Collection[str] = ()) -> Plan:
    """Choose checks by profile, by id, or both; by default all of the default profiles.

    Raises ``ConfigError`` naming unknown profiles or ids.
    """
    known = all_checks()
    _require(profiles, PROFILES, "profile")
    _require(ids, known, "check")
    wanted = tuple(profiles) or tuple(name for name, profile in PROFILES.items() if profile.default)
    chosen = {
        key: entry
        for key, entry in known.items()
        if (key in ids if ids else not set(wanted).isdisjoint(entry.profiles))
    }
    if ids:
        named = [name for name in PROFILES if any(name in c.profiles for c in chosen.values())]
        wanted = tuple(profiles) or tuple(named)
    return Plan(chosen, wanted, seed)


def _require(given: Iterable[str], known: Iterable[str], what: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"no {what} {', '.join(unknown)}; known: {', '.join(sorted(known))}")


@cache
def suite_digest() -> str:
    """SHA-256 over the sources of checks and harness; an edited suite shows."""
    root = Path(__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] not in {"saboteurs", "reports"}:
            total.update(str(relative).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"sha256:{total.hexdigest()}"
