"""Leases: who may read which KV, and until when.

Independent of the transport and of the inference engine.  ``digest`` names
content, ``ledger`` is an engine's record of what it keeps readable, ``control``
carries lookups and leases between engines.
"""
