"""A conversation-aware router in front of prefill and decode engines.

Architecture
    One process, one event loop.  Each request runs through three steps: say
    whose conversation it is (``turn``), let a prefill engine compute the
    prompt (``prefill``), let a decode engine answer and relay its bytes
    (``decode``, ``relay``).  Engines are plain OpenAI-compatible servers; what
    the prefill engine returns as ``kv_transfer_params`` is put into the decode
    engine's request unread.

Memory model
    Affinity (conversation to engine) is bounded in number and age.  Request
    bodies are bounded; responses are relayed, not collected.

Threading
    Everything lives on the event loop.  Importing this package imports neither
    vLLM nor torch nor a web server.
"""

from __future__ import annotations

from kvtransport_vllm.router.config import EngineSpec, RouterConfig, Source

__all__ = ["EngineSpec", "RouterConfig", "Source"]
