"""Recognising a conversation by its content, when nothing names it.

A chat turn carries all earlier messages, so the message list of one turn is a
prefix of the next one's: each turn binds the digest of its whole list, and the
next one finds it among its own prefixes.  Raw prompts work the same way on
prefixes cut at fixed lengths.  This is a guess about *where* KV may be, never
about *what* it is; a wrong guess costs a transfer, not an answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from kvtransport_vllm.router.body import Fields

# A turn adds an assistant and a user message, with tools some more.
_LOOK_BACK = 32
# Long messages (images) are told apart by their length and their two ends.
_HEAD = 4096
_TAIL = 1024
# A prompt is bound at the last multiple of each grain and looked up at the last
# sixteen: found again after growing at least fourfold.
_GRAINS = (64, 256, 1024, 4096, 16384, 65536)
_PER_GRAIN = 16
_LONGEST_PROMPT = 1 << 20

_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])


class _Role(msgspec.Struct):
    role: str = ""


_ROLE = msgspec.json.Decoder(_Role)


@dataclass(frozen=True, slots=True)
class ContentKeys:
    """Digests to look up, likeliest first, and to bind after success.

    ``opening`` is true for a first turn: there is nothing to come back to, so
    a match may only break ties.  ``beginning`` is the digest that all turns of a
    chat have in common, empty where there is none.
    """

    lookups: tuple[bytes, ...] = ()
    binds: tuple[bytes, ...] = ()
    opening: bool = False
    beginning: bytes = b""


def content_keys(running: hashlib.blake2b, fields: Fields) -> ContentKeys:
    """The keys of a request; none when it has no usable content.

    ``running`` is consumed.
    """
    running.update(bytes(fields.get("model", b"")) + b"\x00")
    messages = fields.get("messages")
    prompt = fields.get("prompt")
    if messages is not None:
        return _chat_keys(running, messages)
    if prompt is not None:
        return _prompt_keys(running, memoryview(prompt))
    return ContentKeys()


def _chat_keys(running: hashlib.blake2b, raw: msgspec.Raw) -> ContentKeys:
    try:
        messages = _MESSAGES.decode(raw)
        roles = [_ROLE.decode(message).role for message in messages]
    except msgspec.MsgspecError:
        return ContentKeys()  # the engine will say what is wrong with it
    if not messages:
        return ContentKeys()
    digests = []
    for message in messages:
        _update(running, memoryview(message))
        digests.append(running.copy().digest())
    opening = digests[roles.index("user")] if "user" in roles else digests[0]
    if "assistant" not in roles:
        return ContentKeys(
            lookups=(digests[-1],),
            binds=_unique(digests[-1], opening),
            opening=True,
            beginning=opening,
        )
    recent = digests[-1 : -_LOOK_BACK - 1 : -1]
    return ContentKeys(
        lookups=_unique(*recent, opening),
        binds=_unique(digests[-1], opening),
        beginning=opening,
    )


def _update(running: hashlib.blake2b, message: memoryview) -> None:
    running.update(len(message).to_bytes(8))
    if len(message) <= _HEAD + _TAIL:
        running.update(message)
        return
    running.update(message[:_HEAD])
    running.update(message[-_TAIL:])


def _prompt_keys(running: hashlib.blake2b, raw: memoryview) -> ContentKeys:
    # Without its closing quote or bracket a longer prompt's JSON begins with it.
    text = raw[:-1][:_LONGEST_PROMPT]
    cuts = {
        count * grain
        for grain in _GRAINS
        for count in range(len(text) // grain, max(len(text) // grain - _PER_GRAIN, 0), -1)
    }
    digests: dict[int, bytes] = {}
    done = 0
    for cut in sorted(cuts):
        running.update(text[done:cut])
        digests[cut] = running.copy().digest()
        done = cut
    own = {len(text) // grain * grain for grain in _GRAINS} - {0}
    return ContentKeys(
        lookups=tuple(digests[cut] for cut in sorted(cuts, reverse=True)),
        binds=tuple(digests[cut] for cut in sorted(own, reverse=True)),
    )


def _unique(*keys: bytes) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(keys))
