"""Request bodies: the client's fields, kept as raw JSON, and the two legs' bodies.

Only top-level fields are looked at; everything else goes through byte for
byte.  Nothing a client sends may choose an address: transfer parameters, also
those smuggled in as engine extras, are dropped.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvtransport_vllm.router.errors import RequestRefusedError

Fields = dict[str, msgspec.Raw]
_T = TypeVar("_T")

_FIELDS = msgspec.json.Decoder(Fields)
_ANY = msgspec.json.Decoder()
_RAW_ONE = msgspec.Raw(b"1")
_RAW_FALSE = msgspec.Raw(b"false")
_ID_STARTS = frozenset((b'"', b"-", *(b"%d" % digit for digit in range(10))))
_NULL = b"null"
_TRUE = b"true"

_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_MAX_SALT = 1024

# The prefill leg computes the prompt and one token nobody sees.  What would
# make it stream, repeat, return more than asked or refuse one token goes away.
_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "echo",
    "return_token_ids",
)


def parse_fields(body: bytes) -> Fields:
    """The top-level fields of a JSON object.

    Raises RequestRefusedError (400) on anything else.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRefusedError(400, f"the request body is no JSON object: {error}") from error
    for name in _TRANSFER_FIELDS:
        fields.pop(name, None)
    _clean_extras(fields)
    return fields


def _clean_extras(fields: Fields) -> None:
    # vLLM merges vllm_xargs into the very dictionary that holds the transfer
    # parameters, so a string smuggled in there reaches the connector.
    raw = fields.get("vllm_xargs")
    if raw is None or is_null(raw):
        return
    try:
        extras = _FIELDS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestRefusedError(
            400, f"vllm_xargs is no JSON object: {error}", param="vllm_xargs"
        ) from error
    for name in _TRANSFER_FIELDS:
        extras.pop(name, None)
    fields["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(extras))


def is_null(raw: msgspec.Raw | None) -> bool:
    """True for an absent field and for JSON null."""
    return raw is None or bytes(raw) == _NULL


def is_true(raw: msgspec.Raw | None) -> bool:
    """True for JSON true only."""
    return raw is not None and bytes(raw) == _TRUE


def id_at(fields: Fields, path: str, max_bytes: int) -> bytes | None:
    """The string or whole number at a dotted path; None when absent or null.

    Raises ValueError whose text is the reason (``type`` or ``length``) when
    something else is there.
    """
    *outer, last = path.split(".")
    level = fields
    for name in outer:
        raw = level.get(name)
        if raw is None or memoryview(raw)[:1].tobytes() != b"{":
            return None
        level = _decoded(_FIELDS, raw)
    raw = level.get(last)
    if raw is None or is_null(raw):
        return None
    text = memoryview(raw)
    if text[:1].tobytes() not in _ID_STARTS:
        raise ValueError("type")
    # An escaped character takes at most six bytes, and there are the quotes.
    if len(text) > 6 * max_bytes + 2:
        raise ValueError("length")
    return checked_id(_decoded(_ANY, raw), max_bytes)


def _decoded(decoder: msgspec.json.Decoder[_T], raw: msgspec.Raw) -> _T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError("type") from error


def checked_id(value: object, max_bytes: int) -> bytes:
    """An id as bytes.  Raises ValueError (``type`` or ``length``)."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("type")  # noqa: TRY004 - one error type, its text is the reason
    encoded = str(value).encode(errors="surrogatepass")
    if not 0 < len(encoded) <= max_bytes:
        raise ValueError("length")
    return encoded


def client_salt(fields: Fields) -> str | None:
    """The client's own ``cache_salt``.  Raises RequestRefusedError (400)."""
    raw = fields.get("cache_salt")
    if raw is None or is_null(raw):
        return None
    try:
        value = msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        value = ""
    if not 0 < len(value) <= _MAX_SALT:
        raise RequestRefusedError(
            400,
            f"cache_salt must be a string of 1 to {_MAX_SALT} characters",
            param="cache_salt",
        )
    return value


def needs_own_prefill(fields: Fields) -> str | None:
    """Why the decode engine must compute the prompt itself, or None.

    Log probabilities of the prompt exist only where the prompt is computed,
    and beam search takes no transfer parameters.
    """
    if not is_null(fields.get("prompt_logprobs")):
        return "prompt_logprobs"
    if is_true(fields.get("echo")) and not is_null(fields.get("logprobs")):
        return "echo_logprobs"
    if is_true(fields.get("use_beam_search")):
        return "beam_search"
    return None


def with_salt(fields: Fields, salt: str | None) -> Fields:
    """The fields with the router's ``cache_salt``, or with none."""
    fields.pop("cache_salt", None)
    if salt is not None:
        fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    return fields


def prefill_body(fields: Fields, *, chat: bool, params: dict[str, object]) -> bytes:
    """The body of the first leg: one token, not streamed, KV kept for a reader."""
    leg = dict(fields)
    for name in _NOT_FOR_PREFILL:
        leg.pop(name, None)
    leg["max_tokens"] = _RAW_ONE
    if chat or "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = _RAW_ONE
    leg["n"] = _RAW_ONE
    leg["stream"] = _RAW_FALSE
    leg["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(params))
    return msgspec.json.encode(leg)


def decode_body(fields: Fields, params: msgspec.Raw | None) -> bytes:
    """The body of the second leg: the client's own plus what the first returned."""
    if params is None:
        return msgspec.json.encode(fields)
    return msgspec.json.encode({**fields, "kv_transfer_params": params})
