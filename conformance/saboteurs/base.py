"""How a saboteur is written, named and found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from kvtransport import registry
from kvtransport.agent import Agent
from kvtransport.backend import Backend, Blocks, Op, Probe
from kvtransport.capabilities import Capabilities
from kvtransport.layers.base import Layer

HOST = registry.find_backend("host")


class BrokenBackend(Layer):
    """The host backend with one fault; subclasses override what they break."""

    info = HOST

    def __init__(self) -> None:
        super().__init__(registry.load("host")())
        self._private = self.PRIVATE

    @classmethod
    def probe(cls, config: Any) -> Probe:
        return registry.load("host").probe(config)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return registry.load("host").capabilities(config)

    def extra_post(self, op: Op, peer_id: int, blocks: Blocks, notify: bytes | None = None) -> int:
        """Post something nobody asked for; ``poll`` must drop its completion."""
        self._private += 1
        self.inner.post(self._private, op, peer_id, blocks, notify)
        return self._private


Patch = Callable[[Any], Any]
"""Gets the original function and returns what replaces it."""


def patches(**by_name: tuple[str, Patch]) -> MappingProxyType[str, Patch]:
    """``name=(reference, patch)``; the name only documents."""
    return MappingProxyType(dict(by_name.values()))


def always(value: Any) -> Patch:
    """Replace a function by one that returns ``value``."""
    return lambda _original: lambda *_args, **_options: value


class BrokenCore(Agent):
    """The agent after some functions of the core were replaced in this process.

    ``patches`` maps ``"module:Name.attribute"`` to a function that takes the
    original and returns the replacement.
    """

    patches: Mapping[str, Patch] = MappingProxyType({})

    def __init__(self, *args: Any, **options: Any) -> None:
        apply(self.patches)
        super().__init__(*args, **options)


_applied: set[str] = set()


def apply(patches: Mapping[str, Patch]) -> None:
    """Replace functions once per process; raises ``AttributeError`` for unknown ones."""
    for reference, patch in patches.items():
        if reference in _applied:
            continue
        module, _, path = reference.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
        replacement = patch(original)
        if isinstance(vars(owner).get(name), staticmethod):
            replacement = staticmethod(replacement)
        setattr(owner, name, replacement)
        _applied.add(reference)


@dataclass(frozen=True, slots=True)
class Saboteur:
    """``caught_by`` is every check that fails, and no other does.

    ``perhaps`` may fail as well, because it depends on timing whether they do.
    ``target`` is the reference of a Target when plain classes are not enough.
    """

    name: str
    fault: str
    caught_by: tuple[str, ...]
    perhaps: tuple[str, ...] = ()
    backend: str = "host"
    agent: str = "kvtransport.agent:Agent"
    config: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""

    def wire(self) -> dict[str, Any]:
        """What a session takes as its target."""
        if self.target:
            return {"ref": self.target}
        return {"backend": self.backend, "agent": self.agent, "config": dict(self.config)}


_SABOTEURS: dict[str, Saboteur] = {}
Broken = TypeVar("Broken", bound=type)


def saboteur(
    *caught_by: str,
    perhaps: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
    backend: type[Backend] | None = None,
) -> Callable[[Broken], Broken]:
    """Register a broken backend or core; its docstring says what is wrong with it.

    ``backend`` pairs a broken core with a broken backend.
    """

    def register(cls: Broken) -> Broken:
        reference = f"{cls.__module__}:{cls.__name__}"
        core = issubclass(cls, Agent)
        partner = f"{backend.__module__}:{backend.__name__}" if backend is not None else "host"
        _SABOTEURS[cls.__name__] = Saboteur(
            name=cls.__name__,
            fault=(cls.__doc__ or "").strip().split("\n")[0],
            caught_by=tuple(sorted(caught_by)),
            perhaps=tuple(sorted(perhaps)),
            backend=partner if core else reference,
            agent=reference if core else "kvtransport.agent:Agent",
            config=config or {},
        )
        return cls

    return register


def saboteur_target(
    reference: str, fault: str, *caught_by: str, perhaps: Iterable[str] = ()
) -> None:
    """Register a Target with broken hooks or memory as a saboteur."""
    name = reference.partition(":")[2]
    _SABOTEURS[name] = Saboteur(
        name, fault, tuple(sorted(caught_by)), tuple(sorted(perhaps)), target=reference
    )


def all_saboteurs() -> Mapping[str, Saboteur]:
    """Every saboteur by name."""
    package = importlib.import_module("kvtransport_conformance.saboteurs")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in {"base", "campaign"}:
            importlib.import_module(f"{package.__name__}.{module.name}")
    return MappingProxyType(dict(_SABOTEURS))
