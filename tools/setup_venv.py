"""Make a virtual environment from lock files, with visible progress.

Usage: ``python tools/setup_venv.py FOLDER --lock FILE [...] [--over FOLDER]
[--editable] [--check MODULE] [-- PIP ARGUMENTS]``.  Run again at will: what is
already there stays.  Needs the standard library and pip only; where Debian
lacks the package python3-venv, the system's pip fills the environment.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_BAR = 30
_FOUND = re.compile(r"^(?:Collecting|Requirement already satisfied:) (\S+)", re.MULTILINE)
_TORCH_HINT = """\
{module} is installed but cannot be imported.
If this is torch: the lock files name no build of it, and the one found here needs a GPU's
libraries. Name the index of torch's CPU builds, remove {folder}, and try again:

    make PIP_ARGS='--extra-index-url ADDRESS-OF-TORCH-CPU-BUILDS' ...
"""


class Progress:
    """One line that is redrawn on a terminal; elsewhere a line every tenth."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = max(1, total)
        self._done = 0
        self._tenth = -1
        self._live = sys.stdout.isatty()
        self._started = time.monotonic()

    def show(self, done: int, what: str) -> None:
        done = self._done = max(self._done, min(done, self._total))
        seconds = time.monotonic() - self._started
        share = f"{done * 100 // self._total:3} % {seconds:4.0f} s  {what}"
        if self._live:
            filled = done * _BAR // self._total
            bar = "#" * filled + "." * (_BAR - filled)
            print(f"\r\x1b[K{f'{self._title} [{bar}] {share}'[:110]}", end="", flush=True)
        elif (tenth := done * 10 // self._total) != self._tenth:
            self._tenth = tenth
            print(f"{self._title} {share}", flush=True)

    def end(self) -> None:
        self._tenth = -1
        self.show(self._total, "ready")
        if self._live:
            print()


def create(folder: Path) -> list[str]:
    """Create the environment if needed; return the command of a pip that fills it."""
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            venv.create(folder, with_pip=True, symlinks=True)
        except subprocess.CalledProcessError:  # no ensurepip: Debian without python3-venv
            venv.create(folder, with_pip=False, symlinks=True, clear=True)
    if (folder / "bin" / "pip").exists():
        return [str(python), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(python)]


def pins(locks: list[Path]) -> int:
    """How many packages the lock files name."""
    return sum("==" in line for lock in locks for line in lock.read_text().splitlines())


def install(pip: list[str], arguments: list[str], packages: Path, progress: Progress) -> None:
    """Run pip, show how far it is, and its last lines if it fails.

    Each package counts twice: when pip has found it and when it lies in the
    folder ``packages``.
    """
    command = [*pip, "--disable-pip-version-check", "install", "--no-deps", "--no-input"]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--progress-bar", "off", *arguments], stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            said = _FOUND.findall(Path(log.name).read_text())
            installed = sum(1 for _ in packages.glob("*.dist-info"))
            progress.show(len(said) + installed, said[-1] if said and not installed else "")
            time.sleep(0.3)
        if process.returncode:
            tail = "".join(Path(log.name).read_text().splitlines(keepends=True)[-30:])
            sys.exit(f"\n{tail}\npip failed, exit code {process.returncode}")


def library(folder: Path) -> Path:
    """The folder in which an environment's packages lie."""
    return folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def lay_over(folder: Path, below: Path) -> None:
    """Let the environment see another one's packages behind its own."""
    # addsitedir, not a plain path: the other environment's own .pth files count too.
    line = f"import site; site.addsitedir({str(library(below).resolve())!r})\n"
    (library(folder) / "zz_below.pth").write_text(line)


def parse() -> argparse.Namespace:
    """Split our arguments from pip's and check that the locks exist."""
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock", type=Path, nargs="+", required=True)
    parser.add_argument("--over", type=Path)
    parser.add_argument("--editable", action="store_true")
    parser.add_argument("--check", default="")
    options = parser.parse_args(arguments[:at])
    options.pip = arguments[at + 1 :]
    return options


def main() -> None:
    """Create, fill, link and check the environment that the command line asks for."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the system's Python may be older
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    options = parse()
    folder: Path = options.folder
    progress = Progress(folder.name, 2 * pins(options.lock))
    progress.show(0, "creating")
    pip = create(folder)
    locks = [word for lock in options.lock for word in ("--requirement", str(lock))]
    install(pip, [*options.pip, *locks], library(folder), progress)
    if options.over:
        lay_over(folder, options.over)
    if options.editable:
        editable = ["--no-build-isolation", "--editable", str(_ROOT)]
        install(pip, editable, library(folder), progress)
    progress.end()
    if options.check:
        python = str(folder / "bin" / "python")
        if subprocess.run([python, "-c", f"import {options.check}"], check=False).returncode:
            sys.exit(_TORCH_HINT.format(module=options.check, folder=folder))


if __name__ == "__main__":
    main()
