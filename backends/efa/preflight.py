"""What libfabric offers here, found out in a process of its own.

Run as a script: ``preflight.py LIBRARY...`` loads the libraries that NIXL's
LIBFABRIC plugin needs, asks libfabric for its providers and prints JSON::

    {"missing": {library: why}, "providers": [...], "device_memory": [...],
     "libfabric": path}

``device_memory`` are the providers that can register an accelerator's memory.

A separate process, because asking initialises every provider: here, that may
crash or be repeated with another environment without harm.
"""

from __future__ import annotations

import ctypes
import json
import sys

LIBFABRIC = "libfabric.so.1"
_API_VERSION = 1 << 16 | 18
_FI_MSG, _FI_RMA, _FI_HMEM = 1 << 1, 1 << 2, 1 << 47
_EVERY_MR_MODE = 0x7FFFFFFC


class _FabricAttr(ctypes.Structure):
    _fields_ = [
        ("fabric", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("prov_name", ctypes.c_char_p),
    ]


class _DomainAttr(ctypes.Structure):
    _fields_ = [
        ("domain", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("threading", ctypes.c_int),
        ("control_progress", ctypes.c_int),
        ("data_progress", ctypes.c_int),
        ("resource_mgmt", ctypes.c_int),
        ("av_type", ctypes.c_int),
        ("mr_mode", ctypes.c_int),
    ]


class _Info(ctypes.Structure):
    """The head of ``struct fi_info``, the same in every version of libfabric."""


_Info._fields_ = [
    ("next", ctypes.POINTER(_Info)),
    ("caps", ctypes.c_uint64),
    ("mode", ctypes.c_uint64),
    ("addr_format", ctypes.c_uint32),
    ("src_addrlen", ctypes.c_size_t),
    ("dest_addrlen", ctypes.c_size_t),
    ("src_addr", ctypes.c_void_p),
    ("dest_addr", ctypes.c_void_p),
    ("handle", ctypes.c_void_p),
    ("tx_attr", ctypes.c_void_p),
    ("rx_attr", ctypes.c_void_p),
    ("ep_attr", ctypes.c_void_p),
    ("domain_attr", ctypes.POINTER(_DomainAttr)),
    ("fabric_attr", ctypes.POINTER(_FabricAttr)),
]


def missing(libraries: list[str]) -> dict[str, str]:
    """Load ``libraries`` for all to see; say why one cannot be loaded."""
    found = {}
    for name in libraries:
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError as error:
            found[name] = str(error)
    return found


def providers(*, device_memory: bool = False) -> list[str]:
    """The names of libfabric's usable providers, in its order of preference."""
    # Looked up globally, so that a preloaded library can stand before libfabric.
    library = ctypes.CDLL(None)
    library.fi_dupinfo.restype = ctypes.POINTER(_Info)
    library.fi_dupinfo.argtypes = [ctypes.c_void_p]
    hints = library.fi_dupinfo(None)  # an empty one, as fi_allocinfo makes
    hints.contents.domain_attr.contents.mr_mode = _EVERY_MR_MODE
    if device_memory:
        hints.contents.caps = _FI_MSG | _FI_RMA | _FI_HMEM
    first = ctypes.POINTER(_Info)()
    library.fi_getinfo.argtypes = [
        ctypes.c_uint32,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(_Info),
        ctypes.POINTER(ctypes.POINTER(_Info)),
    ]
    if library.fi_getinfo(_API_VERSION, None, None, 0, hints, ctypes.byref(first)):
        return []
    names: list[str] = []
    one = first
    while bool(one):
        name = one.contents.fabric_attr.contents.prov_name.decode()
        if name not in names:
            names.append(name)
        one = one.contents.next
    return names


def libfabric_path() -> str:
    """The file that ``LIBFABRIC`` was loaded from."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        for line in maps:
            path = line.split(maxsplit=5)[5].strip() if "/" in line else ""
            if path.rpartition("/")[2].startswith("libfabric.so"):
                return path
    return ""


def main() -> None:
    """Print the findings as JSON."""
    lacking = missing(sys.argv[1:])
    present = LIBFABRIC not in lacking
    answer = {
        "missing": lacking,
        "providers": providers() if present else [],
        "device_memory": providers(device_memory=True) if present else [],
        "libfabric": libfabric_path(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
