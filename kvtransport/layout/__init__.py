"""KV layout: geometry, block tables and the merging of adjacent runs."""

from __future__ import annotations
