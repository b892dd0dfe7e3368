"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline: how long an example takes depends on the machine, not on the code.
settings.register_profile("kvtransport", deadline=None, print_blob=True)
settings.load_profile("kvtransport")
