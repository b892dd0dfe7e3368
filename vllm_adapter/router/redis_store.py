"""Bindings shared by several router replicas through Redis.

The store may be slow, gone or full of nonsense; the router only ever loses
locality by that.  Reads have a short deadline, after a failure the store is
left alone for a while, writes go through a bounded queue.  This process's own
bindings stay as the second choice.

Each value carries a part of its key.  A reply that ends up with the wrong
question, whatever the reason, is thus never taken for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from kvtransport.errors import BackendUnavailableError
from kvtransport_vllm.router.affinity import Binding, MemoryStore

logger = logging.getLogger("kvtransport.router.redis")

_PREFIX = b"kvt:affinity:"
_QUEUE = 4096
_BATCH = 256
_FIRST_REST_S = 0.25
_LONGEST_REST_S = 10.0
_MAX_VALUE = 512
_TAG = 8


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    tag: bytes
    binding: Binding


_DECODER = msgspec.msgpack.Decoder(_Stored)

# Strings only when the URL asks for decoding; those never match.
_Values = list[bytes | str | None]
_Write = tuple[Sequence[bytes], Binding | None]


class RedisStore:
    """A :class:`kvtransport_vllm.router.affinity.Store` on a Redis server.

    ``on_error`` is called with ``get`` or ``put`` for every failed or skipped
    operation.  Raises BackendUnavailableError when the client is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        ttl_s: float,
        local: MemoryStore,
        on_error: Callable[[str], None],
    ) -> None:
        try:
            from redis import exceptions
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as error:
            raise BackendUnavailableError(
                "--redis-url needs the redis client",
                hint="pip install 'kvtransport[redis]'",
            ) from error
        self._client = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._failures = (exceptions.RedisError, OSError)
        self._timeout_s = timeout_s
        self._ttl_ms = int(ttl_s * 1000)
        self._local = local
        self._on_error = on_error
        self._queue: asyncio.Queue[_Write] = asyncio.Queue(_QUEUE)
        self._rest_s = _FIRST_REST_S
        self._resting_until = 0.0
        self._writer: asyncio.Task[None] | None = None
        self._reads: set[asyncio.Task[_Values | None]] = set()

    async def start(self) -> None:
        """Begin writing what ``put`` queues."""
        self._writer = asyncio.create_task(self._write_forever())

    async def close(self) -> None:
        """Stop writing; what is still queued is lost, which costs locality only."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, *self._reads, return_exceptions=True)
        with contextlib.suppress(*self._failures):
            await self._client.aclose()
        await self._local.close()

    async def get(self, keys: Sequence[bytes]) -> list[Binding | None]:
        own = self._local.peek(keys)
        if not keys:
            return own
        if time.monotonic() < self._resting_until:
            self._on_error("get")
            return own
        # A task of its own: a client that leaves must not cancel a command half
        # way and leave its reply on the connection.
        task = asyncio.create_task(self._read(keys))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        values = task.result() if done else None
        if values is None:
            self._on_error("get")
            return own
        shared = map(self._decoded, keys, values)
        return [_later(*pair) for pair in zip(shared, own, strict=True)]

    def put(self, keys: Sequence[bytes], binding: Binding) -> None:
        self._local.put(keys, binding)
        self._enqueue((tuple(keys), binding))

    def drop(self, key: bytes) -> None:
        self._local.drop(key)
        self._enqueue(((key,), None))

    def __len__(self) -> int:
        return len(self._local)

    def _enqueue(self, write: _Write) -> None:
        try:
            self._queue.put_nowait(write)
        except asyncio.QueueFull:
            self._on_error("put")

    async def _read(self, keys: Sequence[bytes]) -> _Values | None:
        try:
            values: _Values = await self._client.mget([_PREFIX + k for k in keys])
        except self._failures as error:
            self._rest(error)
            return None
        self._rest_s = _FIRST_REST_S
        return values

    def _rest(self, error: BaseException) -> None:
        logger.warning(
            "affinity store: %s: %s; using own memory for %.2f s",
            type(error).__name__,
            error,
            self._rest_s,
        )
        self._resting_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    @staticmethod
    def _decoded(key: bytes, value: bytes | str | None) -> Binding | None:
        if not isinstance(value, bytes) or len(value) > _MAX_VALUE:
            return None
        try:
            stored = _DECODER.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return stored.binding if stored.tag == key[:_TAG] else None

    async def _write_forever(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            if time.monotonic() < self._resting_until:
                self._on_error("put")
                continue
            try:
                await self._write(batch)
            except self._failures as error:
                self._rest(error)
                self._on_error("put")

    async def _write(self, batch: list[_Write]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for keys, binding in batch:
                for key in keys:
                    if binding is None:
                        pipe.delete(_PREFIX + key)
                    else:
                        value = msgspec.msgpack.encode(_Stored(key[:_TAG], binding))
                        pipe.set(_PREFIX + key, value, px=self._ttl_ms)
            await pipe.execute()


def _later(left: Binding | None, right: Binding | None) -> Binding | None:
    if left is None or right is None:
        return left or right
    return left if left.bound_at >= right.bound_at else right
