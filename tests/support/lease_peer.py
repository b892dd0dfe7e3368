"""A whole owner in a process of its own: ledger, control plane, one retained holding.

``python lease_peer.py '{"engine_id": ..., ...}'`` prints its address as JSON,
then answers each line on stdin with one line of JSON status, until stdin ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvtransport.lease.control import ControlPlane, ControlSettings
from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import Holding, Purpose
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.lease.link import LinkTimes
from kvtransport.lease.security import ClusterSecret
from kvtransport.policy.retention import load_retention

BLOCK = 32
SEED = chain_seed(b"test")
FAST = LinkTimes(interval_s=0.2, timeout_s=2.0, not_ready_s=0.05, backoff_max_s=0.3)


def chain(tokens: int, *, begin: int = 0) -> DigestChain:
    return DigestChain.of(range(begin, begin + tokens), SEED)


def make(
    engine_id: str,
    *,
    secret: str = "",
    fingerprint: dict[str, str] | None = None,
    ready: bool = True,
    hold: int = 0,
    **settings: Any,
) -> ControlPlane:
    """A started control plane; ``hold`` tokens from 0 on are retained there."""
    ledger = Ledger(load_retention("ttl"), LedgerSettings(cache_blocks=1000, block_tokens=(BLOCK,)))
    control = ControlPlane(
        ControlSettings(
            secret=ClusterSecret(secret.encode()) if secret else None,
            **{"hello": FAST, **settings},
        ),
        EngineIdentity(engine_id, fingerprint or {"model": "m"}, {"kvtransport": "test"}),
        ledger,
    )
    control.start()
    if ready:
        control.set_agents({0: b"agent of " + engine_id.encode()})
    if hold:
        retain(control, hold)
    return control


def retain(
    control: ControlPlane,
    tokens: int,
    *,
    begin: int = 0,
    first_block: int = 0,
    purpose: Purpose = Purpose.RETAINED,
    request_id: str = "request",
) -> Holding:
    blocks = np.arange(first_block, first_block + -(-tokens // BLOCK), dtype=np.int32)
    holding = control.ledger.insert(
        chain(tokens, begin=begin),
        [blocks],
        request_id=request_id,
        purpose=purpose,
        nbytes=len(blocks),
    )
    assert holding is not None
    return holding


class PeerProcess:
    """Starts this file as a script and talks to it."""

    def __init__(self, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.address: str = self._read()["address"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def status(self) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write("status\n")
        return self._read()

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(10)


def main() -> None:
    control = make(**json.loads(sys.argv[1]))
    print(json.dumps({"address": control.address}), flush=True)  # noqa: T201  # the protocol
    for _ in sys.stdin:
        print(json.dumps(control.status()), flush=True)  # noqa: T201  # the protocol
    control.close()


if __name__ == "__main__":
    main()
