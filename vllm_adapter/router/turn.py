"""Reading a request: whose it is, which conversation, what goes to the engines."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass

from kvtransport_vllm.router.body import (
    Fields,
    checked_id,
    client_salt,
    id_at,
    parse_fields,
    with_salt,
)
from kvtransport_vllm.router.config import RouterConfig, Source
from kvtransport_vllm.router.conversation import content_keys
from kvtransport_vllm.router.errors import RequestRefusedError
from kvtransport_vllm.router.identity import ANONYMOUS, Keyring, Tenant
from kvtransport_vllm.router.metrics import Metrics

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# vLLM's response ids are these plus the request id that we send it.
_RESPONSE_ID = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}

DP_RANK = "x-data-parallel-rank"
REUSE = "x-kvt-reuse"
_PREVIOUS = Source("body", "previous_response_id")
# Fields that name something else than a conversation never contradict one.
_NO_CONFLICT = frozenset(("body:previous_response_id", "body:user"))

# What engines may see of a client's headers.  A list of what is allowed, not of
# what is not: sidecars and other routers take addresses from headers.
_FORWARDED = (
    "authorization",
    "user-agent",
    "traceparent",
    "tracestate",
    "x-correlation-id",
    "x-session-id",
    DP_RANK,
)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RANK = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One key to look up: where it came from and how far it may overrule load."""

    label: str
    key: bytes
    skew: float


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request, read and checked.  Times are monotonic seconds."""

    id: str
    path: str
    fields: Fields
    headers: dict[str, str]
    reuse: bool
    candidates: list[Candidate]
    binds: list[bytes]
    received_s: float
    conversation: str = ""
    """A pseudonym that the conversation's turns have in common; empty if none is known."""
    waited_s: float = 0.0

    @property
    def chat(self) -> bool:
        """True for chat completions."""
        return self.path == CHAT


class TurnReader:
    """Turns a request into a :class:`Turn`; stateless, event loop only."""

    def __init__(self, config: RouterConfig, keyring: Keyring, metrics: Metrics) -> None:
        self._config = config
        self._keyring = keyring
        self._metrics = metrics
        self._forwarded = (*_FORWARDED, *config.forward_headers)
        self._tracks_responses = _PREVIOUS in config.affinity

    def read(self, path: str, headers: dict[str, str], body: bytes, request_id: str) -> Turn:
        """Raises RequestRefusedError (400) naming the field at fault."""
        received_s = time.monotonic()
        fields = parse_fields(body)
        tenant = self._tenant(headers, fields)
        if self._config.tenant_salt:
            with_salt(fields, self._keyring.salt(tenant, client_salt(fields)))
        turn = Turn(
            id=request_id,
            path=path,
            fields=fields,
            headers=self._to_engines(headers, request_id),
            reuse=self._reuse(headers),
            candidates=[],
            binds=[],
            received_s=received_s,
        )
        self._identify(turn, tenant, headers)
        return turn

    def _tenant(self, headers: dict[str, str], fields: Fields) -> Tenant:
        for source in self._config.tenant:
            if source.kind == "header":
                value = headers.get(source.name.lower())
                if value:
                    # The bytes that came, whatever their encoding.
                    return self._keyring.tenant(value.encode("latin-1"))
                continue
            try:
                found = id_at(fields, source.name, self._config.limits.max_id_bytes)
            except ValueError as error:
                raise RequestRefusedError(
                    400,
                    f"{source.name} says who the tenant is and must be a string of 1 to "
                    f"{self._config.limits.max_id_bytes} bytes (wrong {error})",
                    param=source.name,
                ) from error
            if found is not None:
                return self._keyring.tenant(found)
        return ANONYMOUS

    def _to_engines(self, headers: dict[str, str], request_id: str) -> dict[str, str]:
        rank = headers.get(DP_RANK)
        if rank is not None and not _RANK.fullmatch(rank):
            raise RequestRefusedError(
                400, f"{DP_RANK} is {rank[:32]!r}; give a number below 100000", param=DP_RANK
            )
        sent = {name: headers[name] for name in self._forwarded if name in headers}
        sent["content-type"] = "application/json"
        sent["x-request-id"] = request_id
        return sent

    def _reuse(self, headers: dict[str, str]) -> bool:
        value = headers.get(REUSE)
        if value is None:
            return True
        if not self._config.allow_reuse_override:
            raise RequestRefusedError(
                400,
                f"{REUSE} is not allowed here; start the router with --allow-reuse-override",
                param=REUSE,
            )
        if value not in {"on", "off"}:
            raise RequestRefusedError(400, f"{REUSE} is {value[:32]!r}; use on or off", param=REUSE)
        return value == "on"

    def _identify(self, turn: Turn, tenant: Tenant, headers: dict[str, str]) -> None:
        named: list[tuple[str, bytes]] = []
        for source in self._config.affinity:
            if source.kind == "content":
                self._add_content(turn, tenant)
                continue
            value = self._id(source, headers, turn.fields)
            if value is None:
                continue
            key = self._keyring.conversation(tenant, source.label, value)
            turn.candidates.append(Candidate(source.label, key, float("inf")))
            if source != _PREVIOUS:
                turn.binds.append(key)
            if source.label not in _NO_CONFLICT:
                named.append((source.label, value))
                turn.conversation = turn.conversation or self._keyring.pseudonym(key)
        for label, value in named[1:]:
            if value != named[0][1]:
                self._metrics.conflicts.labels(named[0][0], label).inc()
        if self._tracks_responses:
            response = _RESPONSE_ID[turn.path] + turn.id
            turn.binds.append(
                self._keyring.conversation(tenant, _PREVIOUS.label, response.encode())
            )

    def _id(self, source: Source, headers: dict[str, str], fields: Fields) -> bytes | None:
        limit = self._config.limits.max_id_bytes
        try:
            if source.kind == "body":
                return id_at(fields, source.name, limit)
            value = headers.get(source.name.lower())
            return checked_id(value, limit) if value else None
        except ValueError as error:
            self._metrics.ids_ignored.labels(source.label, str(error)).inc()
            return None

    def _add_content(self, turn: Turn, tenant: Tenant) -> None:
        keys = content_keys(self._keyring.content(tenant), turn.fields)
        skew = 0 if keys.opening else self._config.max_skew
        turn.candidates.extend(Candidate("content", key, skew) for key in keys.lookups)
        turn.binds.extend(keys.binds)
        if keys.beginning and not turn.conversation:
            turn.conversation = self._keyring.pseudonym(keys.beginning)


def request_id(headers: dict[str, str]) -> str:
    """The client's request id when it is a sane one, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
