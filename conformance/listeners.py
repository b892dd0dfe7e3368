"""Listening sockets of a process, found through /proc, and rude clients for them."""

from __future__ import annotations

import random
import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

_LISTEN = "0A"
_TIMEOUT_S = 0.5


def listening() -> list[list[Any]]:
    """Return [family, address, port] of every socket this process listens on.

    ``family`` is "tcp", "tcp6" or "unix"; unix sockets have their path (or
    "@name" when abstract) as address and 0 as port.
    """
    mine = _socket_inodes()
    found = [[*entry] for family in ("tcp", "tcp6") for entry in _tcp(family, mine)]
    return found + [["unix", path, 0] for path in _unix(mine)]


def _socket_inodes() -> set[str]:
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _rows(table: str) -> list[list[str]]:
    try:
        lines = Path(f"/proc/self/net/{table}").read_text().splitlines()
    except OSError:
        return []
    return [line.split() for line in lines[1:]]


def _tcp(family: str, mine: set[str]) -> list[tuple[str, str, int]]:
    found = []
    for row in _rows(family):
        if row[3] != _LISTEN or row[9] not in mine:
            continue
        raw, _, port = row[1].partition(":")
        found.append((family, _address(raw), int(port, 16)))
    return found


def _address(raw: str) -> str:
    """Decode the kernel's hexadecimal address: 32-bit words in host byte order."""
    words = [int(raw[i : i + 8], 16) for i in range(0, len(raw), 8)]
    data = b"".join(struct.pack("=I", word) for word in words)
    return str(IPv4Address(data) if len(data) == 4 else IPv6Address(data))


def _unix(mine: set[str]) -> list[str]:
    # Columns: num, refcount, protocol, flags, type, state, inode, path; flag 0x10000 listens.
    return [
        row[7]
        for row in _rows("unix")
        if len(row) > 7 and row[6] in mine and int(row[3], 16) & 0x10000
    ]


def is_loopback(address: str) -> bool:
    """Whether a TCP listener's address can only be reached from this host."""
    if ":" in address:
        six = IPv6Address(address)
        four = six.ipv4_mapped
        return six.is_loopback or (four is not None and four.is_loopback)
    return IPv4Address(address).is_loopback


def rude_messages(seed: int) -> list[bytes]:
    """Garbage of many shapes: empty, short, text, random, huge lengths, one megabyte."""
    rng = random.Random(seed)  # noqa: S311  # reproducible garbage, no secret
    return [
        b"",
        b"\0",
        b"\xff" * 8,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<Q", (1 << 63) - 1),
        struct.pack(">Q", (1 << 63) - 1),
        b"\x7fELF" + bytes(60),
        *(rng.randbytes(size) for size in (1, 7, 16, 64, 257, 4096)),
        rng.randbytes(1 << 20),
    ]


def attack(family: str, address: str, port: int, seed: int) -> int:
    """Connect again and again, send garbage, hang up rudely; return accepted connections.

    Half of the connections are left open until the end, as a slow client would.
    """
    open_sockets: list[socket.socket] = []
    accepted = 0
    for number, message in enumerate(rude_messages(seed)):
        client = _connect(family, address, port)
        if client is None:
            continue
        accepted += 1
        _send(client, message)
        if number % 2:
            open_sockets.append(client)
        else:
            client.close()
    for client in open_sockets:
        client.close()
    return accepted


def _connect(family: str, address: str, port: int) -> socket.socket | None:
    kinds = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}
    client = socket.socket(kinds[family], socket.SOCK_STREAM)
    client.settimeout(_TIMEOUT_S)
    where: Any = (_reachable(address), port) if family != "unix" else address.replace("@", "\0", 1)
    try:
        client.connect(where)
    except OSError:
        client.close()
        return None
    return client


def _reachable(address: str) -> str:
    """Turn a wildcard into the loopback address of its family."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104


def _send(client: socket.socket, message: bytes) -> None:
    try:
        client.sendall(message)
    except OSError:
        return  # hanging up on garbage is right
