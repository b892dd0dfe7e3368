"""Ledger: insert + give up with 100,000 holdings, and lookups, in one thread.

Conversations have one of a few lengths and begin with a common system prompt,
whose blocks they share.  Times are CPU time of this thread's process, so other
load on the machine disturbs them less (it still costs cache and clock).  Each
policy runs in a process of its own: in a heap that another left in pieces the
same work takes some 5 % longer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import time

import numpy as np

from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import Purpose
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.policy.retention import load_retention

SEED = chain_seed(b"bench")
BLOCK = 32
LENGTHS = (1024, 2048, 1024, 4096)
SHARED = 512
PREFIX = os.urandom(16 * (SHARED // 16))
COMMON = np.arange(SHARED // BLOCK, dtype=np.int32)
MEAN_BLOCKS = sum(LENGTHS) // len(LENGTHS) // BLOCK
LOOKUPS = 20_000


class Conversations:
    """Chains (with digests made up), block ids and costs, made before anything is measured."""

    def __init__(self, count: int) -> None:
        fresh = itertools.count(COMMON.size)
        self.chains = []
        self.rows = []
        self.costs = []
        for at in range(count):
            tokens = LENGTHS[at % len(LENGTHS)]
            digests = PREFIX + os.urandom(16 * (tokens - SHARED) // 16)
            self.chains.append(DigestChain(bytes(4 * tokens), digests, SEED, 16, ()))
            # Longer ones save more per byte, as attention makes them.
            self.costs.append((tokens * 131072, tokens * 5e-5 + tokens * tokens * 2e-8))
            own = [next(fresh) for _ in range(tokens // BLOCK - COMMON.size)]
            self.rows.append((np.concatenate((COMMON, np.array(own, dtype=np.int32))),))
        self.blocks = next(fresh)


class Bench:
    """One ledger and what goes into it."""

    def __init__(self, policy: str, holdings: int, extra: int) -> None:
        self.holdings = holdings
        self.extra = extra
        self.known = Conversations(holdings + extra)
        settings = LedgerSettings(cache_blocks=self.known.blocks, block_tokens=(BLOCK,))
        self.ledger = Ledger(load_retention(policy, {"budget_fraction": 1.0}), settings)

    def insert(self, at: int) -> None:
        """Retain conversation ``at``."""
        nbytes, saved_s = self.known.costs[at]
        self.ledger.insert(
            self.known.chains[at],
            self.known.rows[at],
            request_id="",
            purpose=Purpose.RETAINED,
            nbytes=nbytes,
            saved_s=saved_s,
        )

    def fill(self) -> None:
        """Insert until ``holdings`` are there."""
        for at in range(self.holdings):
            self.insert(at)

    def churn(self) -> None:
        """Each insertion is preceded by giving one holding up."""
        for at in range(self.holdings, self.holdings + self.extra):
            self.ledger.make_room(1)
            self.insert(at)
            if not at % 64:
                self.ledger.collect()

    def look_up(self) -> None:
        """Lease and release conversations."""
        for at in range(LOOKUPS):
            chain = self.known.chains[(at * 7919) % (self.holdings + self.extra)]
            grant = self.ledger.lookup(chain.digests, chain.num_tokens, duration_s=10, reader="r")
            if grant is not None:
                self.ledger.release(grant.lease_id, delivered=False)


def measure(policy: str, holdings: int, extra: int) -> dict[str, float | str]:
    """Operations per second of each phase."""
    bench = Bench(policy, holdings, extra)
    # The garbage collector shall look at the ledger's objects, not at the benchmark's.
    gc.collect()
    gc.freeze()
    marks = [time.process_time()]
    for phase in (bench.fill, bench.churn, bench.look_up):
        phase()
        marks.append(time.process_time())
    gc.unfreeze()
    fill, churn, look_up = (b - a for a, b in itertools.pairwise(marks))
    return {
        "policy": policy,
        "holdings": bench.ledger.snapshot()["holdings"],
        "insert_per_s": round(holdings / fill),
        "insert_and_give_up_per_s": round(extra / churn),
        "lookup_and_release_per_s": round(LOOKUPS / look_up),
    }


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", nargs="+", default=["ttl", "budgeted"])
    parser.add_argument("--holdings", type=int, default=100_000)
    parser.add_argument("--extra", type=int, default=50_000)
    options = parser.parse_args()
    runs = [(name, options.holdings, options.extra) for name in options.policy]
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as alone:
        print(json.dumps(alone.starmap(measure, runs, chunksize=1), indent=2))


if __name__ == "__main__":
    main()
