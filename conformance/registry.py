"""The checks as data: id, level, profiles, revision and one function each.

A check is registered by a decorator in ``kvtransport_conformance.checks``; the
docstring of its function says what must hold and is what ``explain`` prints.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from kvtransport_conformance.profiles import PROFILES

if TYPE_CHECKING:
    from kvtransport_conformance.context import Context

Level = Literal["core", "extended", "provisional", "info"]
CheckFunction = Callable[["Context"], None]

_ID = re.compile(r"[A-Z]{2,3}-\d{2}")
DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One named property of a transport.

    ``profiles`` maps a profile to the level that the check has within it: a
    READ check is extended in general and core for ``KVT-READ``.  ``needs`` are
    capability flags; when one is declared absent the check becomes
    ``NOT_SUPPORTED`` after its refusal was verified.  ``fresh`` checks get a
    process pair of their own, because they kill, freeze or fork it.  ``noisy``
    checks cause faults, so warnings in the log are right.
    """

    id: str
    name: str
    level: Level
    profiles: Mapping[str, Level]
    function: CheckFunction = field(repr=False)
    needs: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    first_release: bool = False
    since: str = "2026.1"
    revision: int = 1
    why: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    fresh: bool = False
    noisy: bool = False

    @property
    def group(self) -> str:
        return self.id.split("-")[0]

    @property
    def text(self) -> str:
        """What must hold, from the function's docstring."""
        return (self.function.__doc__ or "").strip()


_CHECKS: dict[str, Check] = {}


def check(
    check_id: str,
    *,
    level: Level,
    profiles: Iterable[str] | Mapping[str, Level],
    needs: Iterable[str] = (),
    covers: Iterable[str] = (),
    first_release: bool = False,
    revision: int = 1,
    why: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    fresh: bool = False,
    noisy: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register the decorated function as check ``check_id``; its name is the check's.

    ``covers`` names the capability flags that a PASS verifies (by default those
    in ``needs``).  Raises ``ValueError`` for a second check of one id, an id of
    the wrong shape, an unknown profile or a function without docstring.
    """
    levels = dict(profiles) if isinstance(profiles, Mapping) else dict.fromkeys(profiles, level)

    def register(function: CheckFunction) -> CheckFunction:
        entry = Check(
            id=check_id,
            name=getattr(function, "__name__", check_id),
            level=level,
            profiles=MappingProxyType(levels),
            function=function,
            needs=tuple(needs),
            covers=tuple(covers) or tuple(needs),
            first_release=first_release,
            revision=revision,
            why=why,
            timeout_s=timeout_s,
            fresh=fresh,
            noisy=noisy,
        )
        _validate(entry)
        _CHECKS[check_id] = entry
        return function

    return register


def _validate(entry: Check) -> None:
    if not _ID.fullmatch(entry.id):
        raise ValueError(f"check id {entry.id!r} must look like 'CMP-06'")
    if entry.id in _CHECKS:
        raise ValueError(f"check id {entry.id} is registered twice")
    if not entry.text:
        raise ValueError(f"check {entry.id} has no docstring saying what must hold")
    unknown = set(entry.profiles) - set(PROFILES)
    if unknown or not entry.profiles:
        raise ValueError(f"check {entry.id} names unknown profiles {sorted(unknown)}")


def all_checks() -> Mapping[str, Check]:
    """Every check of the suite by id, in the order of the catalogue."""
    package = importlib.import_module("kvtransport_conformance.checks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return MappingProxyType(dict(sorted(_CHECKS.items(), key=lambda item: _catalogue(item[0]))))


_GROUPS = (
    "REG", "DSC", "WR", "RD", "CMP", "NTF", "MD", "ORD", "CON",
    "CAN", "PD", "TD", "SEC", "INT", "DEV", "PRF", "KVX",
)  # fmt: skip


def _catalogue(check_id: str) -> tuple[int, str]:
    group = check_id.split("-", maxsplit=1)[0]
    return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS), check_id)
