"""Where prepared models are kept, and how they get there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """``$KVTRANSPORT_CACHE``, else ``kvtransport`` in the user's cache folder."""
    chosen = os.environ.get("KVTRANSPORT_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvtransport"


def cached(name: str, build: Callable[[Path], None], *, cache: Path | None = None) -> Path:
    """The folder ``name`` in the cache, built first if it is not there.

    ``build`` fills an empty folder that gets its name only when it is complete;
    processes that want the same one wait for each other.  What ``build`` raises
    is passed on, and nothing is left then.
    """
    root = cache or cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    target = root / name
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
            try:
                part.chmod(0o755)  # mkdtemp's 0700 would hide it from other users
                build(part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return target
