"""What the router is told at start: engines, identity sources, limits.

Everything here is checked before the first socket is opened.  A wrong value is
a :class:`kvtransport.errors.ConfigError` that names the option, the value and
the fix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Literal
from urllib.parse import SplitResult, urlsplit

import msgspec

from kvtransport.errors import ConfigError, UnknownOptionError

Role = Literal["prefill", "decode"]

DEFAULT_AFFINITY = (
    "header:X-Conversation-ID,header:X-Session-ID,body:conversation_id,"
    "body:session_id,body:previous_response_id,content"
)
DEFAULT_TENANT = "header:Authorization"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_FIELD = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,3}")
_FRAGMENT = re.compile(r"dp-rank=(\d{1,5})")
_REDIS = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine as the operator wrote it.

    ``named`` is true when the operator chose the name; only then is it also
    the engine's peer name in the other engines' configuration.
    """

    name: str
    url: str
    named: bool = False
    dp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where an identity comes from: a header, a body field or the content."""

    kind: Literal["header", "body", "content"]
    name: str = ""

    @property
    def label(self) -> str:
        """As written in the options, and as metrics show it."""
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and deadlines; seconds and bytes.

    ``request_timeout_s`` is for a client's body, ``prefill_timeout_s`` for all
    of leg 1, ``first_byte_timeout_s`` for the wait in leg 2, ``idle_timeout_s``
    for the pause between bytes in either direction.
    """

    connect_timeout_s: float = 2.0
    prefill_timeout_s: float = 300.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 300.0
    request_timeout_s: float = 30.0
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0
    max_attempts: int = 3
    max_in_flight: int = 4096
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 32 << 10
    max_id_bytes: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The whole configuration; its parts come from the ``parse_*`` functions."""

    prefills: tuple[EngineSpec, ...]
    decodes: tuple[EngineSpec, ...]
    affinity: tuple[Source, ...]
    tenant: tuple[Source, ...]
    secret: bytes
    tenant_salt: bool = True
    affinity_ttl_s: float = 960.0
    affinity_entries: int = 200_000
    max_skew: int = 4
    on_prefill_failure: Literal["decode", "error"] = "decode"
    allow_reuse_override: bool = False
    forward_headers: tuple[str, ...] = ()
    redis_url: str = ""
    redis_timeout_s: float = 0.025
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for role, specs in (("prefill", self.prefills), ("decode", self.decodes)):
            if not specs:
                raise ConfigError(f"no {role} engine; give --{role} NAME=URL at least once")
        if self.affinity_entries < 1 or self.max_skew < 0:
            raise ConfigError(
                f"--affinity-entries is {self.affinity_entries} and --max-skew is "
                f"{self.max_skew}; the first must be at least 1, the second at least 0"
            )
        if self.redis_url and not self.redis_url.startswith(_REDIS):
            raise ConfigError(
                f"--redis-url is {self.redis_url!r}; write redis://HOST:PORT, rediss:// or unix://"
            )
        if not 0 < self.redis_timeout_s < float("inf"):
            raise ConfigError(f"--redis-timeout is {self.redis_timeout_s}; give seconds above 0")


def check_ttl(ttl_s: float, blocks_ttl_s: float) -> float:
    """The affinity TTL, which must outlive the blocks that decodes retain.

    Raises ConfigError when a conversation would be forgotten while its KV is
    still held.
    """
    if ttl_s < blocks_ttl_s:
        raise ConfigError(
            f"--affinity-ttl is {ttl_s:g} s, but decode engines retain KV for "
            f"{blocks_ttl_s:g} s; raise it to at least --decoder-kv-blocks-ttl"
        )
    return ttl_s


def parse_engines(texts: Iterable[str], role: Role) -> tuple[EngineSpec, ...]:
    """``NAME=URL`` or ``URL``, each; unnamed ones are called ``decode-0`` and so on.

    Raises ConfigError on a malformed or repeated entry.
    """
    specs: list[EngineSpec] = []
    for number, text in enumerate(texts):
        spec = _parse_engine(text.strip(), role, number)
        if any(spec.name == other.name for other in specs):
            raise ConfigError(f"--{role} {text!r}: the name {spec.name!r} is taken; use another")
        specs.append(spec)
    return tuple(specs)


def _parse_engine(text: str, role: Role, number: int) -> EngineSpec:
    name, sign, rest = text.partition("=")
    named = bool(sign) and _NAME.fullmatch(name) is not None
    url = rest if named else text
    if "://" not in url:
        url = f"http://{url}"
    parts = _split(url, role, text)
    rank = _FRAGMENT.fullmatch(parts.fragment)
    if parts.fragment and rank is None:
        raise ConfigError(
            f"--{role} {text!r}: {parts.fragment!r} after '#' is unknown; use #dp-rank=NUMBER"
        )
    return EngineSpec(
        name=name if named else f"{role}-{number}",
        url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
        named=named,
        dp_rank=int(rank[1]) if rank else None,
    )


def _split(url: str, role: Role, text: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--{role} {text!r}: {error}; write http://HOST:PORT") from error
    wrong = (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or port == 0
        or parts.username is not None
        or bool(parts.query)
    )
    if wrong:
        raise ConfigError(
            f"--{role} {text!r} is no engine address; write [NAME=]http://HOST:PORT "
            "(IPv6 as http://[::1]:8000), without user, password or query"
        )
    return parts


def parse_sources(text: str, option: str, *, content: bool) -> tuple[Source, ...]:
    """A comma-separated, ordered list of identity sources; ``none`` is the empty list.

    ``content`` says whether the source of that name is allowed here.
    Raises ConfigError on an unknown form.
    """
    if text.strip() == "none":
        return ()
    return tuple(_parse_source(item.strip(), option, content=content) for item in text.split(","))


def _parse_source(item: str, option: str, *, content: bool) -> Source:
    kind, _, name = item.partition(":")
    if kind == "header" and _HEADER.fullmatch(name):
        return Source("header", name)
    if kind == "body" and _FIELD.fullmatch(name):
        return Source("body", name)
    if item == "content" and content:
        return Source("content")
    allowed = "header:NAME, body:FIELD" + (", content" if content else "")
    raise ConfigError(f"{option}: {item!r} is no source; use {allowed} or none, comma-separated")


def limit_names() -> tuple[str, ...]:
    """The names that ``--limit`` takes, such as ``prefill-timeout``."""
    return tuple(_limit_name(item) for item in fields(Limits))


def _limit_name(item: Field[object]) -> str:
    return item.name.removesuffix("_s").replace("_", "-")


def parse_limits(texts: Iterable[str]) -> Limits:
    """``NAME=NUMBER`` each.

    Raises UnknownOptionError with the nearest name, or ConfigError on a value
    that is no positive number.
    """
    known = {_limit_name(item): item for item in fields(Limits)}
    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        item = known.get(name)
        if item is None:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UnknownOptionError(f"--limit {text!r}: there is no {name!r}; try {near}")
        try:
            number = int(value) if isinstance(item.default, int) else float(value)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise ConfigError(f"--limit {text!r}: give {name}=NUMBER above 0, e.g. {item.default}")
        given[item.name] = number
    return msgspec.convert(given, Limits)


def parse_on_failure(text: str) -> Literal["decode", "error"]:
    """What happens when no prefill engine can serve.  Raises ConfigError."""
    match text:
        case "decode" | "error":
            return text
        case _:
            raise ConfigError(f"--on-prefill-failure is {text!r}; use decode or error")


def parse_headers(names: Sequence[str]) -> tuple[str, ...]:
    """Lower-case header names.  Raises ConfigError on one that is no header name."""
    for name in names:
        if not _HEADER.fullmatch(name):
            raise ConfigError(f"--forward-header {name!r} is no header name; write e.g. X-Trace-Id")
    return tuple(name.lower() for name in names)
