"""Write requirements/*.txt from requirements/locks.toml, with nothing but pip.

Usage: ``python tools/lock.py [LOCK ...] [-- PIP ARGUMENTS]``.  Resolves with the
running interpreter and platform, installs nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent.parent / "requirements"
_HEADER = """\
# Made by "make lock" from locks.toml; do not edit.  Install with --no-deps.
# Python {version} on {platform}.
"""


def _pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def normal(requirement: str) -> str:
    """The normalised name at the beginning of a requirement."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def _own_requirements(requirement: str, without: set[str], pip: list[str]) -> list[str]:
    """What a distribution itself requires, without extras and unwanted names."""
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--quiet", "--no-deps", "--dest", folder, *pip, requirement)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
    asked = [str(value) for value in metadata.get_all("Requires-Dist") or []]
    return [each for each in asked if "extra ==" not in each and normal(each) not in without]


def _resolve(requirements: list[str], pip: list[str]) -> dict[str, str]:
    report = json.loads(
        _pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *pip,
             *requirements)
    )  # fmt: skip
    found = (item["metadata"] for item in report["install"])
    # A local version ("+cpu") names a build, which each machine chooses for itself.
    return {normal(item["name"]): item["version"].partition("+")[0] for item in found}


def lock(name: str, source: dict[str, Any], pip: list[str]) -> None:
    """Resolve one table of locks.toml and write its file."""
    without = set(source.get("without", ()))
    requirements = list(source["roots"])
    as_is = list(source.get("as_is", ()))
    only = set(source.get("only", ()))
    if not only:
        for each in as_is:
            requirements += _own_requirements(each, without, pip)
    if "like" in source:
        pip = [*pip, "--constraint", str(_FOLDER / f"{source['like']}.txt")]
    pins = _resolve(requirements, pip) if requirements else {}
    for each in as_is:
        pins[normal(each)] = each.partition("==")[2]
    version = ".".join(map(str, sys.version_info[:2]))
    lines = [f"{key}=={pins[key]}\n" for key in sorted(pins) if not only or key in only]
    header = _HEADER.format(version=version, platform=sys.platform)
    (_FOLDER / f"{name}.txt").write_text(header + "".join(lines))
    print(f"{name}: {len(lines)} packages")


def main() -> None:
    """Lock what the command line names, or everything."""
    arguments = sys.argv[1:]
    pip: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, pip = arguments[:at], arguments[at + 1 :]
    sources = tomllib.loads((_FOLDER / "locks.toml").read_text())
    for name in arguments or sources:
        lock(name, sources[name], pip)


if __name__ == "__main__":
    main()
