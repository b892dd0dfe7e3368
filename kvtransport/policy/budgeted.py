"""``budgeted``: give up first what is worth least per byte."""

from __future__ import annotations

from kvtransport.policy.retention import RetainForTtl


class RetainByValue(RetainForTtl):
    """First cut: least recently used; the value order comes next."""
