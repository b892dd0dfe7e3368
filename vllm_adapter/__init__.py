"""kvtransport inside vLLM: the connector, the router and helpers to run both.

Importing this package imports neither vLLM nor torch, so that the router can
run on a machine without them; vLLM finds the connector class here by name
(``kv_connector_module_path: kvtransport_vllm``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtransport_vllm.connector import KVTransportConnector

__all__ = ["KVTransportConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVTransportConnector":
        from kvtransport_vllm.connector import KVTransportConnector

        return KVTransportConnector
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
