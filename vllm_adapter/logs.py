"""Our log lines in vLLM's format, unless somebody has configured logging."""

from __future__ import annotations

import logging


def share_handlers() -> None:
    """Let the logger ``kvtransport`` print where and how vLLM's does.

    vLLM gives handlers to its own logger only.  Ours would come out bare, without
    time and level.  What a user has configured, for ours or for all, stays.
    """
    ours = logging.getLogger("kvtransport")
    if not ours.hasHandlers():
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
