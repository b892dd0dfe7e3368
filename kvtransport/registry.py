"""Backends found through the entry-point group ``kvtransport.backends``.

An entry point names a ``BackendInfo``; importing that costs little, and the
driver is imported only by ``load``.  Our own backends are found the same way as
a stranger's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from kvtransport.backend import API_VERSION, Backend, BackendInfo
from kvtransport.errors import (
    BackendContractError,
    BackendUnavailableError,
    KVTransportError,
    UnknownBackendError,
)

GROUP = "kvtransport.backends"


@dataclass(frozen=True, slots=True)
class Entry:
    """One installed backend, not imported yet."""

    name: str
    distribution: str
    version: str
    point: EntryPoint


def _discover(points: Iterable[EntryPoint]) -> Mapping[str, tuple[Entry, ...]]:
    found: dict[str, dict[str, Entry]] = {}
    for point in points:
        dist = point.dist
        name, version = (dist.name, dist.version) if dist is not None else ("unknown", "?")
        # One distribution may be listed twice: on disk and as an editable install.
        found.setdefault(point.name, {})[f"{name} {point.value}"] = Entry(
            point.name, name, version, point
        )
    return MappingProxyType({name: tuple(entries.values()) for name, entries in found.items()})


@cache
def installed() -> Mapping[str, tuple[Entry, ...]]:
    """Every backend name and the distributions that provide it; a read-only view."""
    return _discover(entry_points(group=GROUP))


def refresh() -> None:
    """Look again at what is installed."""
    installed.cache_clear()


def find(name: str) -> Entry:
    """Return the one distribution that provides ``name``.

    Raises ``UnknownBackendError`` when there is none, or more than one.
    """
    entries = installed().get(name, ())
    if len(entries) == 1:
        return entries[0]
    if entries:
        who = " and ".join(f"{e.distribution} {e.version}" for e in entries)
        raise UnknownBackendError(f"backend {name!r} is provided by {who}; uninstall one of them")
    known = sorted(installed())
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"installed are: {', '.join(known) or 'none'}"
    raise UnknownBackendError(
        f"no installed distribution provides backend {name!r}; {hint} "
        f"(a backend is an entry point in the group {GROUP!r})"
    )


def find_backend(name: str) -> BackendInfo:
    """Import the description of a backend, without its driver.

    Raises ``UnknownBackendError``, ``BackendUnavailableError`` when it cannot be
    imported or was built for another contract, ``BackendContractError`` when
    the entry point is not a ``BackendInfo`` of that name.
    """
    entry = find(name)
    who = f"{entry.distribution} {entry.version}"
    try:
        info = entry.point.load()
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"backend {name!r} of {who} cannot be imported: {error}",
            hint=f"Reinstall {entry.distribution}",
            backend=name,
        ) from error
    if not isinstance(info, BackendInfo) or info.name != name:
        raise BackendContractError(
            f"entry point {entry.point.value} of {who} must be a BackendInfo named {name!r}, "
            f"got {info!r}"
        )
    if info.api_version != API_VERSION:
        raise BackendUnavailableError(
            f"backend {name!r} of {who} implements version {info.api_version} of the backend "
            f"contract and this kvtransport has version {API_VERSION}",
            hint=f"Install a release of {entry.distribution} made for it",
            backend=name,
        )
    return info


def load(name: str) -> type[Backend]:
    """Import a backend's class; the driver may be imported, no hardware is touched.

    Raises what ``find_backend`` raises, and ``BackendUnavailableError`` with the
    install hint when the driver's wrapper cannot be imported.
    """
    return load_info(find_backend(name))


def load_info(info: BackendInfo) -> type[Backend]:
    """As ``load``, from a description."""
    try:
        loaded = info.load()
    except KVTransportError:
        raise
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"backend {info.name!r} cannot be loaded: {error}",
            hint=info.install_hint,
            backend=info.name,
        ) from error
    _check_class(info, loaded)
    return loaded


def _check_class(info: BackendInfo, loaded: object) -> None:
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise BackendContractError(f"backend {info.name!r} loads {loaded!r}, which is no Backend")
