"""What else is in this process: loaded libraries and environment variables."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_environment_lock = threading.Lock()


def loaded_libraries(stem: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The distinct files mapped in this process whose name begins with ``stem``.

    ``stem`` is a library's name without version, ``"libfabric"``; the hashed
    names that wheels give their copies (``libucp-b39b3ed9.so.0``) count too.
    """
    pattern = re.compile(rf"{re.escape(stem)}(-[0-9a-f]+)?\.so(\.|$)")
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/") > 0}
    return sorted(path for path in paths if pattern.match(Path(path).name))


def foreign_copies(stem: str, module: str) -> list[str]:
    """Copies of a library in this process that do not belong to NIXL's ``module``.

    Empty when ``module`` brings no copy of its own (a build from source): then
    nothing says which one it will use.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    site = Path(spec.origin).parent.parent
    own = (site / f"{module}.libs", site / f".{module}.mesonpy.libs")
    if not any(folder.glob(f"{stem}*") for folder in own if folder.is_dir()):
        return []
    return [
        path
        for path in loaded_libraries(stem)
        if not any(Path(path).is_relative_to(folder) for folder in own)
    ]


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` for C libraries that read them now; restore them after."""
    with _environment_lock:
        former = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in former.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def thread_ids() -> frozenset[str]:
    """The kernel's ids of this process's threads."""
    return frozenset(path.name for path in Path("/proc/self/task").iterdir())


def spins(thread_id: str, patience_s: float = 2.0) -> bool:
    """Whether a thread runs without ever going to sleep.

    It does when it used 20 ms of a core, or was ready for ``patience_s``, and
    gave up the core of its own accord not once.
    """
    task = Path(f"/proc/self/task/{thread_id}")
    until = time.monotonic() + patience_s
    try:
        sleeps, used = _sleeps(task), _used_ns(task)
        while time.monotonic() < until and _used_ns(task) - used < 20_000_000:
            time.sleep(0.001)
            if _sleeps(task) != sleeps:
                return False
    except OSError:
        return False  # it has ended
    return True


def _sleeps(task: Path) -> int:
    """How often a thread gave up its core to wait."""
    for line in (task / "status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return 0


def _used_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


def make_immortal(thing: object) -> None:
    """Keep ``thing`` from ever being destroyed, at interpreter exit too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
