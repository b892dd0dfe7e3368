"""Registers the connector by name (entry point ``vllm.general_plugins``).

With it ``{"kv_connector": "KVTransportConnector"}`` is enough; without it
``kv_connector_module_path`` names the package.
"""

from __future__ import annotations

NAME = "KVTransportConnector"


def register() -> None:
    """Add the connector to vLLM's factory; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  # no public query exists
        KVConnectorFactory.register_connector(NAME, "kvtransport_vllm.connector", NAME)
