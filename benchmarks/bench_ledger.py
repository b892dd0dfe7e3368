"""Ledger: insert + give up with 100,000 holdings, and lookups, in one thread."""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import Purpose
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.policy.retention import load_retention

SEED = chain_seed(b"bench")
BLOCK = 32


def chains(count: int, tokens: int, shared: int) -> list[DigestChain]:
    """Conversations with a common beginning of ``shared`` tokens; digests made up."""
    prefix = os.urandom(16 * (shared // 16))
    groups = tokens // 16 - shared // 16
    return [
        DigestChain(bytes(4 * tokens), prefix + os.urandom(16 * groups), SEED, 16, ())
        for _ in range(count)
    ]


def measure(policy: str, holdings: int, tokens: int, shared: int, extra: int) -> dict[str, float]:
    """Fill a ledger, then let each insert push one holding out, then look up."""
    blocks = tokens // BLOCK
    settings = LedgerSettings(cache_blocks=(holdings + 8) * blocks, block_tokens=(BLOCK,))
    ledger = Ledger(load_retention(policy, {"budget_fraction": 1.0}), settings)
    queries = chains(holdings + extra, tokens, shared)
    # Each holding has its own blocks and the blocks of the common beginning.
    common = np.arange(shared // BLOCK, dtype=np.int32)
    rows = [
        (
            np.concatenate(
                (
                    common,
                    np.arange(at * blocks, at * blocks + blocks - common.size)
                    % settings.cache_blocks,
                )
            ).astype(np.int32),
        )
        for at in range(1, holdings + extra + 1)
    ]

    def insert(at: int) -> None:
        ledger.insert(queries[at], rows[at], request_id="", purpose=Purpose.RETAINED, nbytes=1)

    start = time.process_time()
    for at in range(holdings):
        insert(at)
    filled = time.process_time()
    for at in range(holdings, holdings + extra):
        ledger.make_room(1)
        insert(at)
        if not at % 64:
            ledger.collect()
    churned = time.process_time()
    for at in range(extra, extra + 20_000):
        grant = ledger.lookup(
            queries[at % holdings + extra].digests, tokens, duration_s=10, reader="r"
        )
        if grant is not None:
            ledger.release(grant.lease_id, delivered=False)
    looked = time.process_time()
    return {
        "insert_per_s": holdings / (filled - start),
        "insert_and_give_up_per_s": extra / (churned - filled),
        "lookup_and_release_per_s": 20_000 / (looked - churned),
        "holdings": float(ledger.snapshot()["holdings"]),
    }


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="ttl")
    parser.add_argument("--holdings", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--extra", type=int, default=50_000)
    options = vars(parser.parse_args())
    print(json.dumps({**options, **measure(**options)}, indent=2))


if __name__ == "__main__":
    main()
