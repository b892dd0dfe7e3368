"""The demo is a folder of scripts; its modules are found where they lie."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
