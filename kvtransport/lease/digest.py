"""Content identity: a keyed digest for every prefix of a token sequence.

Architecture
    Tokens are cut into groups of ``group_tokens``.  The digest of group ``i``
    covers *all* tokens up to and including group ``i``, so two sequences share
    digest ``i`` exactly if they share that whole prefix.  The key ("seed")
    carries everything besides tokens that decides what KV looks like: model
    fingerprint, tenant, LoRA.  An identity that belongs to a position (an
    image, a prompt embedding) changes the digest of the group that holds the
    position and of every group after it.

Format (protocol version 1)
    A group without extra identities continues one BLAKE2b-128 state, keyed with
    the seed, over the tokens as little-endian 32-bit words.  A group with extra
    identities starts a new state, whose key is derived from the digest before
    it and the identities; so no token can imitate an identity.

Threading
    A ``DigestChain`` is immutable and may be shared.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from sys import byteorder
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvtransport.errors import ConfigError

DIGEST_NBYTES = 16
GROUP_TOKENS = 16
SEED_NBYTES = 32

Tokens = Sequence[int] | NDArray[np.integer]
Extra = Sequence[tuple[int, bytes]]

_SEED_KEY = b"kvtransport digest seed 1"
_EXTRA_PERSON = b"kvt-extra"
_TAIL_PERSON = b"kvt-tail"
_START = bytes(DIGEST_NBYTES)


def chain_seed(fingerprint: bytes, *, tenant: str = "", lora: str = "") -> bytes:
    """The 32-byte key of a chain.

    ``fingerprint`` names the model, its weights and its KV geometry; ``tenant``
    is the isolation salt (vLLM's ``cache_salt``); ``lora`` the adapter's name.
    Two requests share KV only if all three are equal.
    """
    state = blake2b(key=_SEED_KEY, digest_size=SEED_NBYTES, person=b"kvt-seed")
    # Whatever a request could carry has an encoding; this must not fail on any.
    names = (name.encode(errors="surrogatepass") for name in (tenant, lora))
    for part in (fingerprint, *names):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()


def token_words(tokens: Tokens) -> bytes:
    """Tokens as little-endian 32-bit words.

    Raises ``ConfigError`` for a token outside 0 .. 2**32-1.
    """
    if isinstance(tokens, np.ndarray):
        words = _array_words(tokens)
    else:
        try:
            words = array("I", tokens)
        except (OverflowError, TypeError) as error:
            raise ConfigError(f"tokens must be integers from 0 to 2**32-1: {error}") from None
    if byteorder == "big":
        words = array("I", words)
        words.byteswap()
    return words.tobytes()


def _array_words(tokens: NDArray[np.integer]) -> array[int]:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"tokens must be one row of integers, not shape {tokens.shape} of {tokens.dtype}"
        )
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > 0xFFFFFFFF):
        raise ConfigError("tokens must be integers from 0 to 2**32-1")
    words = array("I")
    words.frombytes(np.ascontiguousarray(tokens, dtype=np.uint32).tobytes())
    return words


@dataclass(frozen=True, slots=True, eq=False)
class DigestChain:
    """Digests of every full group of a token sequence, and of its tail on demand.

    ``digests`` holds 16 bytes per full group; ``words`` the tokens as
    little-endian 32-bit words.  Make one with ``DigestChain.of``.
    """

    words: bytes
    digests: bytes
    seed: bytes
    group_tokens: int
    extra: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        seed: bytes,
        *,
        group_tokens: int = GROUP_TOKENS,
        extra: Extra = (),
    ) -> DigestChain:
        """Digest ``tokens`` under ``seed`` (see ``chain_seed``).

        ``extra`` holds (token position, identity) pairs in any order.
        Raises ``ConfigError`` for a wrong seed, group size, token or position.
        """
        if len(seed) != SEED_NBYTES:
            raise ConfigError(f"seed must have {SEED_NBYTES} bytes, not {len(seed)}")
        if not 1 <= group_tokens <= 4096:
            raise ConfigError(f"group_tokens must be from 1 to 4096, not {group_tokens}")
        words = token_words(tokens)
        bound = _checked_extra(extra, len(words) // 4)
        digests = _chain(words, seed, group_tokens, bound)
        return cls(words, digests, seed, group_tokens, bound)

    @property
    def num_tokens(self) -> int:
        return len(self.words) // 4

    @property
    def groups(self) -> int:
        """Number of full groups."""
        return len(self.digests) // DIGEST_NBYTES

    @property
    def tail_tokens(self) -> int:
        """Tokens behind the last full group: 0 .. group_tokens-1."""
        return len(self.words) // 4 % self.group_tokens

    def digest(self, group: int) -> bytes:
        """Digest of the first ``group`` groups; 16 zero bytes for ``group`` 0."""
        if group == 0:
            return _START
        return self.digests[(group - 1) * DIGEST_NBYTES : group * DIGEST_NBYTES]

    def tail_digest(self, group: int, length: int) -> bytes:
        """Digest of the first ``group`` groups and the ``length`` tokens after them.

        Empty when the sequence is too short or ``length`` is not a partial
        group: no tail can match it.
        """
        start = group * self.group_tokens
        if not 0 < length < self.group_tokens or start + length > self.num_tokens:
            return b""
        state = blake2b(self.digest(group), key=self.seed, digest_size=16, person=_TAIL_PERSON)
        state.update(self.words[4 * start : 4 * (start + length)])
        inside = [pair for pair in self.extra if start <= pair[0] < start + length]
        if inside:
            state.update(_encoded(inside))
        state.update(struct.pack("<II", length, len(inside)))
        return state.digest()


def _checked_extra(
    extra: Iterable[tuple[int, bytes]], tokens: int
) -> tuple[tuple[int, bytes], ...]:
    pairs = tuple(sorted((_position(at), bytes(identity)) for at, identity in extra))
    for at, _ in pairs:
        if not 0 <= at < tokens:
            raise ConfigError(f"extra identity at token {at}, but there are {tokens} tokens")
    return pairs


def _position(at: SupportsIndex) -> int:
    return at.__index__()


def _encoded(pairs: Iterable[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack("<QQ", at, len(identity)) + identity for at, identity in pairs)


def _chain(
    words: bytes, seed: bytes, group_tokens: int, extra: tuple[tuple[int, bytes], ...]
) -> bytes:
    step = 4 * group_tokens
    end = len(words) // step * step
    person = b"kvt%d" % group_tokens
    special: dict[int, list[tuple[int, bytes]]] = {}
    for at, identity in extra:
        special.setdefault(at // group_tokens * step, []).append((at, identity))
    state = blake2b(key=seed, digest_size=DIGEST_NBYTES, person=person)
    out: list[bytes] = []
    for at in range(0, end, step):
        if special and at in special:
            before = out[-1] if out else _START
            key = blake2b(before, key=seed, digest_size=32, person=_EXTRA_PERSON)
            key.update(_encoded(special[at]))
            state = blake2b(key=key.digest(), digest_size=DIGEST_NBYTES, person=person)
        state.update(words[at : at + step])
        out.append(state.copy().digest())
    return b"".join(out)
