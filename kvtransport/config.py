"""Typed configuration: a mapping becomes a frozen object, or a clear error.

An option's value comes from the first of: argument, environment, file, default.
The environment names an option ``KVT_<SECTION>_<OPTION>``; the file is TOML with
one table per section, ``[backend.host]`` for backends::

    [backend.host]
    path = "tcp"

``resolve`` keeps where each value came from, so that ``kvt config explain`` can
tell.  A field whose metadata says ``secret`` is never shown.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from kvtransport.backend import BackendInfo
from kvtransport.errors import ConfigError, UnknownOptionError

T = TypeVar("T")

FILE_VARIABLE = "KVT_CONFIG"
"""Environment variable that names the configuration file."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a configuration type."""

    name: str
    type: Any
    default: Any
    required: bool
    secret: bool = False
    help: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """One option's value, as text, and the place that set it."""

    option: Option
    shown: str
    source: str


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """A decoded configuration and the origin of each of its options."""

    config: T
    origins: Mapping[str, Origin]


def options_of(kind: type[Any]) -> dict[str, Option]:
    """List the options of a dataclass or msgspec Struct by name."""
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return {
            f.name: _dataclass_option(f, hints[f.name]) for f in dataclasses.fields(kind) if f.init
        }
    if issubclass(kind, msgspec.Struct):
        return {
            f.name: Option(
                f.name,
                hints[f.name],
                f.default_factory()
                if f.default_factory is not msgspec.NODEFAULT
                else (None if f.default is msgspec.NODEFAULT else f.default),
                f.required,
            )
            for f in msgspec.structs.fields(kind)
        }
    raise ConfigError(f"{kind.__name__} is neither a dataclass nor a msgspec Struct")


def _dataclass_option(f: dataclasses.Field[Any], hint: Any) -> Option:
    default, required = f.default, False
    if default is dataclasses.MISSING:
        factory = f.default_factory
        required = factory is dataclasses.MISSING
        default = None if factory is dataclasses.MISSING else factory()
    secret, text = bool(f.metadata.get("secret")), str(f.metadata.get("help", ""))
    return Option(f.name, hint, default, required, secret, text)


def decode(kind: type[T], values: Mapping[str, Any], *, where: str = "configuration") -> T:
    """Build ``kind`` from ``values``.

    Raises ``UnknownOptionError`` naming the nearest valid option, or
    ``ConfigError`` naming option, value and what would be valid.
    """
    options = options_of(kind)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping of options, got {type(values).__name__}")
    for name in values:
        if name not in options:
            raise UnknownOptionError(_unknown(str(name), options, where))
    converted = {
        name: _convert(options[name], value, where, strict=True) for name, value in values.items()
    }
    return _build(kind, options, converted, where)


def _build(kind: type[T], options: Mapping[str, Option], values: dict[str, Any], where: str) -> T:
    missing = [name for name, o in options.items() if o.required and name not in values]
    if missing:
        raise ConfigError(f"{where}: option {missing[0]!r} is required and not set")
    try:
        return kind(**values)
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise type(error)(f"{where}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _unknown(name: str, options: Mapping[str, Option], where: str) -> str:
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if near:
        return f"{where} has no option {name!r}; did you mean {near[0]!r}?"
    known = ", ".join(sorted(options)) or "none"
    return f"{where} has no option {name!r}; its options are: {known}"


def _convert(option: Option, value: Any, where: str, *, strict: bool) -> Any:
    if dataclasses.is_dataclass(option.type) and isinstance(value, Mapping):
        return decode(option.type, value, where=f"{where}.{option.name}")  # type: ignore[arg-type]
    try:
        return msgspec.convert(value, option.type, strict=strict)
    except msgspec.ValidationError as error:
        shown = "***" if option.secret else repr(value)
        fix = re.sub(r"^Expected", "expected", str(error))
        raise ConfigError(f"{where}: {option.name}={shown} is not valid: {fix}") from None
    except TypeError:
        # A type that msgspec does not know, such as an object passed from Python.
        return value


def backend_config(info: BackendInfo, config: Any) -> Any:
    """Return a backend's configuration object from an object, a mapping or None."""
    if isinstance(config, info.config):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config of backend {info.name!r} must be {info.config.__name__} or a mapping, "
            f"got {type(config).__name__}"
        )
    return resolve(info.config, f"backend.{info.name}", argument=config or {}).config


build_config = backend_config


def environment_name(section: str, option: str) -> str:
    """The variable that sets an option: ``KVT_HOST_PATH`` for backend host, path."""
    short = section.removeprefix("backend.")
    return re.sub(r"[^A-Z0-9]+", "_", f"KVT_{short}_{option}".upper())


def load_file(path: str | os.PathLike[str] | None = None) -> tuple[Mapping[str, Any], str]:
    """Read the configuration file and return it with its name.

    Without ``path`` the environment variable ``KVT_CONFIG`` names it; without
    both there is none.
    """
    name = os.fspath(path) if path is not None else os.environ.get(FILE_VARIABLE, "")
    if not name:
        return {}, ""
    try:
        return tomllib.loads(Path(name).read_text(encoding="utf-8")), name
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {name!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {name!r} is not valid TOML: {error}") from error


def _section(content: Mapping[str, Any], section: str, name: str) -> Mapping[str, Any]:
    found: Any = content
    for part in section.split("."):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}: [{section}] must be a table of options")
    return found


def _from_environment(
    section: str, options: Mapping[str, Option], environment: Mapping[str, str]
) -> dict[str, str]:
    prefix = environment_name(section, "")
    names = {environment_name(section, option): option for option in options}
    found = {}
    for variable, value in environment.items():
        if variable in names:
            found[names[variable]] = value
        elif variable.startswith(prefix):
            near = difflib.get_close_matches(variable, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {sorted(names)}"
            raise UnknownOptionError(f"environment variable {variable} sets nothing{hint}")
    return found


def resolve(
    kind: type[T],
    section: str,
    *,
    argument: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Resolved[T]:
    """Decode ``kind`` from argument, environment, file and defaults, in that order.

    ``section`` is the file's table, such as ``backend.host``.  Raises the errors
    of ``decode``; they name the place that set the value.
    """
    options = options_of(kind)
    content, file_name = load_file(file)
    environment = os.environ if environment is None else environment
    layers: list[tuple[str, Mapping[str, Any], bool]] = [
        (f"file {file_name}", _section(content, section, file_name), True),
        ("environment", _from_environment(section, options, environment), False),
        ("argument", argument or {}, True),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer, strict in layers:
        where = section if source == "argument" else f"{source}, {section}"
        for name, value in layer.items():
            if name not in options:
                raise UnknownOptionError(_unknown(str(name), options, where))
            values[name] = _convert(options[name], value, where, strict=strict)
            sources[name] = source
            if source == "environment":
                sources[name] = f"environment {environment_name(section, name)}"
    config = _build(kind, options, values, section)
    origins = {
        name: Origin(option, _show(option, getattr(config, name)), sources.get(name, "default"))
        for name, option in options.items()
    }
    return Resolved(config, origins)


def _show(option: Option, value: Any) -> str:
    return "***" if option.secret and value else repr(value)
