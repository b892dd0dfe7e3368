"""``python -m kvtransport_vllm.router`` is ``kvt router``."""

from __future__ import annotations

from kvtransport_vllm.router.cli import app

app()
