"""The web server around the router."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from kvtransport.errors import ConfigError
from kvtransport_vllm.router.app import Router
from kvtransport_vllm.router.config import RouterConfig

logger = logging.getLogger("kvtransport.router")

_DRAIN_S = 10
_BACKLOG = 2048
# Longer than load balancers keep idle connections, so that they close first.
_KEEP_ALIVE_S = 75
_LEVELS = ("debug", "info", "warning", "error")


class _NoIncompleteResponses(logging.Filter):
    """A broken answer stays incomplete on purpose and was reported by the leg."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def serve(config: RouterConfig, *, host: str, port: int, log_level: str) -> None:
    """Serve until a signal; then let requests under way finish for ten seconds.

    Raises ConfigError when the address can't be bound.
    """
    if log_level not in _LEVELS:
        raise ConfigError(f"--log-level is {log_level!r}; use one of {', '.join(_LEVELS)}")
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("uvicorn.error").addFilter(_NoIncompleteResponses())
    with _bound(host, port) as listener:
        asyncio.run(_serve(config, listener))


async def _serve(config: RouterConfig, listener: socket.socket) -> None:
    # h11 rather than httptools: it bounds the size of headers while they arrive.
    options = uvicorn.Config(
        Router(config),
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=config.limits.max_header_bytes,
        limit_concurrency=2 * config.limits.max_in_flight,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_DRAIN_S,
    )
    await _Server(options, config).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Says where it listens, once it does."""

    def __init__(self, options: uvicorn.Config, router: RouterConfig) -> None:
        super().__init__(options)
        self._router = router

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started or not sockets:
            return
        host, port = sockets[0].getsockname()[:2]
        logger.info(
            "listening on http://%s:%d prefill=%s decode=%s affinity=%s tenant=%s",
            f"[{host}]" if ":" in host else host,
            port,
            ",".join(spec.name for spec in self._router.prefills),
            ",".join(spec.name for spec in self._router.decodes),
            ",".join(source.label for source in self._router.affinity),
            ",".join(source.label for source in self._router.tenant) or "none",
        )


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; give 0 to 65535")
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with
    # it, the first byte of a stream can wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host!r} --port {port}: {error}") from error
    listener.setblocking(False)
    return listener
