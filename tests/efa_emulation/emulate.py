"""Run commands with NIXL's LIBFABRIC where there is no EFA: see README.md here.

    emulate.py prepare                            # once: environment, libraries, shims
    emulate.py run --level 2 -- COMMAND ...       # as root: in a network namespace
    emulate.py exec b --level 2 -- COMMAND ...    # the peer's side of a running "run"

``run`` makes two network namespaces joined by a virtual cable, runs COMMAND in
the first one and removes them afterwards.  COMMAND finds in its environment

``EFA_EMULATION_LEVEL``        1: libfabric's TCP provider; 2: emulated EFA and Neuron
``EFA_EMULATION_PEER_PREFIX``  what to put before a command to run it in the second one
``EFA_EMULATION_CONFIG``       the efa backend's options for that level, as JSON

Needs root for the namespaces, gcc for the shims, and on Debian the packages
libhwloc15, libnuma1 and libfabric-dev, which ``prepare`` unpacks into its own
folder without installing them.  Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("KVTRANSPORT_CACHE") or ROOT / ".cache") / "efa"
VENV = ROOT / ".venv-efa"
DEBIAN = ("libhwloc15", "libnuma1", "libfabric-dev")
LIBRARY_DIRS = "usr/lib/x86_64-linux-gnu"

NAMESPACES = {"a": "kvt-efa-a", "b": "kvt-efa-b"}
CABLES = {"a": "kvtefa-a", "b": "kvtefa-b"}
ADDRESSES = {"a": "10.213.77.1/24", "b": "10.213.77.2/24"}

CONFIGS = {
    1: {"device": "none", "allow_fallback": True, "liveness": "0.0.0.0"},
    2: {"device": "neuron", "emulated": True, "liveness": "0.0.0.0"},
}


def sh(*command: str | Path, quiet: bool = False) -> None:
    """Run a command; a failure ends this one with its message."""
    done = subprocess.run(
        [str(word) for word in command], check=False, capture_output=quiet, text=True
    )
    if done.returncode:
        said = (done.stderr or "").strip()
        raise SystemExit(f"{shlex.join(map(str, command))} failed ({done.returncode}). {said}")


# -- preparing ---------------------------------------------------------------


def prepare(pip_arguments: list[str]) -> None:
    """Make what the two levels need; what is already there stays."""
    setup = [sys.executable, ROOT / "tools" / "setup_venv.py", VENV]
    lock = ["--lock", HERE / "requirements.txt", "--editable", "--check", "nixl_cu12"]
    sh(*setup, *lock, "--", *pip_arguments)
    CACHE.mkdir(parents=True, exist_ok=True)
    unpack_debian()
    compile_shims()
    print(f"ready: {VENV.name}, {CACHE}")  # noqa: T201  # a program says what it did


def unpack_debian() -> None:
    """Fetch Debian's packages and unpack them beside, not into, the system."""
    target = CACHE / "debian"
    if (target / "usr/include/rdma/fabric.h").exists():
        return
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise SystemExit(f"{tool} is missing: this emulation is set up on Debian or Ubuntu")
    packages = CACHE / "packages"
    packages.mkdir(exist_ok=True)
    done = subprocess.run(
        ["apt-get", "download", *DEBIAN], cwd=packages, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"apt-get download failed; run apt-get update first. {done.stderr}")
    for package in sorted(packages.glob("*.deb")):
        sh("dpkg", "--extract", package, target)


def compile_shims() -> None:
    """Compile the three shims of this folder with gcc."""
    if not shutil.which("gcc"):
        raise SystemExit("gcc is missing: apt install gcc libc6-dev")
    include = CACHE / "debian" / "usr" / "include"
    flags = ["-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    common, second = CACHE / "common", CACHE / "emulated"
    for folder in (common, second):
        folder.mkdir(exist_ok=True)
    sh("gcc", *flags, "-Wl,-soname,libcuda.so.1", "-o", common / "libcuda.so.1",
       HERE / "cuda_stub.c")  # fmt: skip
    sh("gcc", *flags, "-Wl,-soname,libnrt.so.1", "-o", second / "libnrt.so.1",
       HERE / "nrt_stub.c")  # fmt: skip
    sh("gcc", *flags, "-I", include, "-o", second / "fake_efa.so", HERE / "fake_efa.c", "-ldl")


# -- running -----------------------------------------------------------------


def environment(level: int) -> dict[str, str]:
    """The variables that commands of a level need."""
    mpich = VENV / "lib" / "mpich"
    cudart = next(VENV.glob("lib/python3.*/site-packages/nvidia/cuda_runtime/lib"), None)
    if cudart is None or not (CACHE / "emulated" / "fake_efa.so").exists():
        raise SystemExit(f"run first: {sys.executable} {HERE / 'emulate.py'} prepare")
    folders = [CACHE / "common", mpich, cudart, CACHE / "debian" / LIBRARY_DIRS]
    variables = {
        "EFA_EMULATION_LEVEL": str(level),
        "EFA_EMULATION_CONFIG": json.dumps(CONFIGS[level]),
        "EFA_EMULATION_PEER_PREFIX": shlex.join(exec_prefix("b", level)),
        "FI_PROVIDER_PATH": str(mpich / "libfabric"),
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
    }
    if level == 2:
        folders.insert(0, CACHE / "emulated")
        variables["LD_PRELOAD"] = str(CACHE / "emulated" / "fake_efa.so")
        variables["HWLOC_XMLFILE"] = str(HERE / "topology.xml")
        variables["HWLOC_THISSYSTEM"] = "1"
    variables["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in folders)
    return variables


def exec_prefix(side: str, level: int) -> list[str]:
    """The command that runs what follows it on one side, from the present folder.

    Relative, because it becomes part of reports, which shall hold anywhere.
    """
    python, script = (os.path.relpath(path) for path in (VENV / "bin/python", HERE / "emulate.py"))
    return [python, script, "exec", side, "--level", str(level), "--"]


def require_root() -> None:
    """End with a clear message when this is not root."""
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this with sudo")
    for tool in ("ip",):
        if not shutil.which(tool):
            raise SystemExit("ip is missing: apt install iproute2")


def up() -> None:
    """Make the two namespaces and the cable between them."""
    down()
    for name in NAMESPACES.values():
        sh("ip", "netns", "add", name)
    sh("ip", "link", "add", CABLES["a"], "type", "veth", "peer", "name", CABLES["b"])
    for side, name in NAMESPACES.items():
        sh("ip", "link", "set", CABLES[side], "netns", name)
        sh("ip", "-n", name, "addr", "add", ADDRESSES[side], "dev", CABLES[side])
        for device in ("lo", CABLES[side]):
            sh("ip", "-n", name, "link", "set", device, "up")


def down() -> None:
    """Remove the namespaces; their interfaces go with them."""
    for name in NAMESPACES.values():
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", CABLES["a"]], check=False, capture_output=True)


def run(level: int, command: list[str]) -> int:
    """Run ``command`` on side a, between ``up`` and ``down``."""
    require_root()
    variables = environment(level)
    up()
    try:
        inside = ["ip", "netns", "exec", NAMESPACES["a"], *with_environment(variables, command)]
        return subprocess.run(inside, check=False).returncode
    finally:
        down()


def with_environment(variables: dict[str, str], command: list[str]) -> list[str]:
    # Through env(1), so that the preloaded shim reaches the command and not ip(8).
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def main() -> int:
    """Parse the arguments and do it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("prepare", help="make the environment, libraries and shims")
    for name in ("run", "exec"):
        action = actions.add_parser(name)
        if name == "exec":
            action.add_argument("side", choices=sorted(NAMESPACES))
        action.add_argument("--level", type=int, choices=sorted(CONFIGS), default=1)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:cut]), words[cut + 1 :]
    if options.action == "prepare":
        prepare(command)
        return 0
    if not command:
        parser.error("give a command after --")
    if options.action == "run":
        return run(options.level, command)
    require_root()
    inside = with_environment(environment(options.level), command)
    namespace = NAMESPACES[options.side]
    os.execvp("ip", ["ip", "netns", "exec", namespace, *inside])
    return 1


if __name__ == "__main__":
    sys.exit(main())
