"""The ``kv_transfer_params`` of a request: read with suspicion, written plainly.

Nothing in a request body chooses an address: what names an engine here is
looked up among the peers of the configuration and ignored when it is not one.
Key names are those that vLLM's own connectors use, so that routers which copy
P's answer into D's request work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MAX_TEXT = 256
_MAX_CONVERSATION = 64
_MAX_ASKED = 64


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What one request asks of the connector."""

    prefill_only: bool = False
    """``do_remote_decode``: compute the prompt here, another engine decodes."""
    remote_prefill: bool = False
    """``do_remote_prefill``: another engine has computed the prompt."""
    engine_id: str = ""
    remote_request_id: str = ""
    ask: tuple[str, ...] = ()
    reuse: bool = True
    address: str = ""
    address_token: str = ""
    """Proof, made with the cluster secret, that ``address`` may be contacted."""
    conversation: str = ""
    """What a router calls this conversation; only told apart in the log of turns."""
    refused: tuple[str, ...] = ()
    """Keys whose values were not usable and were ignored."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Whom to ask, by names that the control plane checks; empty: everybody."""
        return tuple(name for name in (self.engine_id, *self.ask) if name)


def parse(raw: Any) -> TransferParams:
    """Read the params of a request; unusable values are named, never raised."""
    if raw is None:
        return TransferParams()
    if not isinstance(raw, dict):
        return TransferParams(refused=("kv_transfer_params",))
    reader = _Reader(raw)
    return TransferParams(
        prefill_only=reader.flag("do_remote_decode", default=False),
        remote_prefill=reader.flag("do_remote_prefill", default=False),
        engine_id=reader.text("remote_engine_id"),
        remote_request_id=reader.text("remote_request_id"),
        ask=reader.names("kvt_ask"),
        reuse=reader.flag("kvt_reuse", default=True),
        address=reader.text("kvt_address"),
        address_token=reader.text("kvt_address_token"),
        conversation=reader.text("kvt_conversation", most=_MAX_CONVERSATION),
        refused=tuple(reader.refused),
    )


class _Reader:
    """Typed, bounded access to an untrusted mapping."""

    def __init__(self, raw: dict[Any, Any]) -> None:
        self._raw = raw
        self.refused: list[str] = []

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.refused.append(key)
        return default

    def text(self, key: str, *, most: int = _MAX_TEXT) -> str:
        value = self._raw.get(key)
        if value is None:
            return ""
        if isinstance(value, str) and len(value) <= most:
            return value
        self.refused.append(key)
        return ""

    def names(self, key: str) -> tuple[str, ...]:
        value = self._raw.get(key)
        if value is None:
            return ()
        if (
            isinstance(value, list)
            and len(value) <= _MAX_ASKED
            and all(isinstance(v, str) and len(v) <= _MAX_TEXT for v in value)
        ):
            return tuple(value)
        self.refused.append(key)
        return ()


def handoff(
    *, engine_id: str, request_id: str, host: str, port: int, tp_size: int
) -> dict[str, Any]:
    """What P returns for D.  Blocks are found by content, so none are listed."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
    }
