"""Control plane: lookup + lease between two processes over loopback.

Prints the latency of one lookup at a time (lookup, lease, release) and the
throughput with several in flight, with and without encryption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import deque

import numpy as np

from kvtransport.lease.control import ControlPlane, ControlSettings
from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import Purpose
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.lease.security import ClusterSecret
from kvtransport.policy.retention import load_retention

SEED = chain_seed(b"bench")
BLOCK = 32
SECRET = ClusterSecret(b"benchmark cluster secret")
CONVERSATIONS = 64


def chain(tokens: int, conversation: int) -> DigestChain:
    """Conversations share a beginning of 512 tokens."""
    rest = range(10_000 * (conversation + 1), 10_000 * (conversation + 1) + tokens - 512)
    return DigestChain.of([*range(512), *rest], SEED)


def make(engine_id: str, *, encrypted: bool, peers: dict[str, str]) -> ControlPlane:
    """A started control plane with an empty ledger."""
    ledger = Ledger(
        load_retention("ttl"), LedgerSettings(cache_blocks=10**6, block_tokens=(BLOCK,))
    )
    settings = ControlSettings(peers=peers, secret=SECRET if encrypted else None)
    control = ControlPlane(settings, EngineIdentity(engine_id, {"model": "m"}), ledger)
    control.set_agents({0: bytes(1000)})
    control.start()
    return control


def serve(*, encrypted: bool, tokens: int) -> None:
    """The owner's process: holds the conversations until its input ends."""
    control = make("owner", encrypted=encrypted, peers={})
    blocks = tokens // BLOCK
    for at in range(CONVERSATIONS):
        ids = np.arange(at * blocks, (at + 1) * blocks, dtype=np.int32)
        control.ledger.insert(
            chain(tokens, at), [ids], request_id="", purpose=Purpose.RETAINED, nbytes=0
        )
    print(control.address, flush=True)
    sys.stdin.read()
    control.close()


def one_at_a_time(control: ControlPlane, queries: list[DigestChain], count: int) -> list[float]:
    """Seconds of each lookup, the lease released after it."""
    taken = []
    for at in range(count):
        began = time.perf_counter()
        result = control.lookup(queries[at % len(queries)], deadline_s=10.0).wait(10.0)
        taken.append(time.perf_counter() - began)
        if result is None or result.lease is None:
            raise SystemExit(f"lookup failed: {result}")
        result.lease.release(delivered=False)
    return sorted(taken)


def many_in_flight(
    control: ControlPlane, queries: list[DigestChain], count: int, depth: int
) -> float:
    """Lookups per second with ``depth`` on their way."""
    flying = deque()
    began = time.perf_counter()
    for at in range(count + depth):
        if at < count:
            flying.append(control.lookup(queries[at % len(queries)], deadline_s=10.0))
        if at >= depth:
            result = flying.popleft().wait(10.0)
            if result is None or result.lease is None:
                raise SystemExit(f"lookup failed: {result}")
            result.lease.release(delivered=False)
    return count / (time.perf_counter() - began)


def measure(*, encrypted: bool, tokens: int, count: int, depth: int) -> dict[str, object]:
    """Start an owner, measure against it, end it."""
    command = [sys.executable, __file__, "--serve", "--tokens", str(tokens)]
    owner = subprocess.Popen(
        command + ["--encrypted"] * encrypted,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    control = make("reader", encrypted=encrypted, peers={"o": owner.stdout.readline().strip()})
    queries = [chain(tokens, at) for at in range(CONVERSATIONS)]
    one_at_a_time(control, queries, 200)
    taken = one_at_a_time(control, queries, count)
    per_s = many_in_flight(control, queries, count, depth)
    control.close()
    owner.communicate("", timeout=10)
    return {
        "encrypted": encrypted,
        "tokens": tokens,
        "lookup_p50_us": round(taken[len(taken) // 2] * 1e6, 1),
        "lookup_p99_us": round(taken[len(taken) * 99 // 100] * 1e6, 1),
        f"lookups_per_s_{depth}_in_flight": round(per_s),
    }


def main() -> None:
    """Measure, or serve for a measuring process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--depth", type=int, default=64)
    options = parser.parse_args()
    if options.serve:
        serve(encrypted=options.encrypted, tokens=options.tokens)
        return
    results = [
        measure(encrypted=e, tokens=options.tokens, count=options.count, depth=options.depth)
        for e in (False, True)
    ]
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
