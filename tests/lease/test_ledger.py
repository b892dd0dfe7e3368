"""Single situations of the ledger that the model does not look at."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kvtransport.errors import ConfigError
from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import DropReason, Holding, Purpose
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.policy.retention import load_retention

SEED = chain_seed(b"ledger")
BLOCK = 32


def chain(tokens: int, begin: int = 0) -> DigestChain:
    return DigestChain.of(range(begin, begin + tokens), SEED)


@pytest.fixture
def ledger() -> Ledger:
    return make()


def make(
    *,
    policy: str = "ttl",
    clock: Callable[[], float] = lambda: 0.0,
    block_tokens: tuple[int, ...] = (BLOCK,),
    null_block: int | None = None,
    blocks: int = 1000,
) -> Ledger:
    return Ledger(
        load_retention(policy, {"budget_fraction": 1.0}),
        LedgerSettings(cache_blocks=blocks, block_tokens=block_tokens, null_block=null_block),
        clock=clock,
    )


def insert(
    ledger: Ledger,
    tokens: int,
    *,
    begin: int = 0,
    first: int = 0,
    purpose: Purpose = Purpose.RETAINED,
    request_id: str = "",
    tenant: str = "",
) -> Holding | None:
    rows = [
        np.arange(first, first + -(-tokens // size), dtype=np.int32)
        for size in ledger.settings.block_tokens
    ]
    return ledger.insert(
        chain(tokens, begin),
        rows,
        request_id=request_id,
        purpose=purpose,
        nbytes=1,
        tenant=tenant,
    )


def test_supersession_stays_within_the_tenant(ledger: Ledger) -> None:
    """Even if a caller gave two tenants one seed."""
    insert(ledger, 64, tenant="a")
    insert(ledger, 128, first=10, tenant="b")
    assert ledger.collect() == []
    insert(ledger, 128, first=20, tenant="a")
    assert [item.reason for item in ledger.collect()] == [DropReason.SUPERSEDED]


def test_the_same_tokens_again_supersede(ledger: Ledger) -> None:
    first = insert(ledger, 70)
    second = insert(ledger, 70, first=10)
    assert [item.holding for item in ledger.collect()] == [first]
    assert second is not None
    assert second.turns == 1


def test_another_tail_does_not_supersede(ledger: Ledger) -> None:
    insert(ledger, 70)
    edited = DigestChain.of([*range(68), 1, 1, *range(70, 128)], SEED)
    rows = [np.arange(10, 14, dtype=np.int32)]
    ledger.insert(edited, rows, request_id="", purpose=Purpose.RETAINED, nbytes=1)
    assert ledger.collect() == []


def test_a_handoff_supersedes_nothing_and_is_not_superseded(ledger: Ledger) -> None:
    insert(ledger, 64)
    insert(ledger, 128, first=10, purpose=Purpose.HANDOFF, request_id="r")
    insert(ledger, 256, first=20)
    assert [item.holding.tokens for item in ledger.collect()] == [64]


def test_superseded_while_leased_lives_until_the_lease_ends(ledger: Ledger) -> None:
    old = insert(ledger, 64)
    grant = ledger.lookup(chain(64).digests, 64, duration_s=10, reader="r")
    assert grant is not None
    insert(ledger, 128, first=10)
    assert ledger.collect() == []
    again = ledger.lookup(chain(64).digests, 64, duration_s=10, reader="r")
    assert again is not None
    assert again.holding_id != grant.holding_id, "no new lease on what is ending"
    assert ledger.renew(grant.lease_id, 10)
    ledger.release(grant.lease_id, delivered=True)
    assert [item.holding for item in ledger.collect()] == [old]


def test_delivery_of_a_handoff_found_elsewhere(ledger: Ledger) -> None:
    """The reader read a longer holding, and still its handoff is done with."""
    insert(ledger, 64, purpose=Purpose.HANDOFF, request_id="r")
    insert(ledger, 128, first=10)
    query = chain(128)
    grant = ledger.lookup(query.digests, 128, duration_s=10, reader="d", handoff_request_id="r")
    assert grant is not None
    assert grant.purpose is Purpose.RETAINED
    ledger.release(grant.lease_id, delivered=True)
    assert [item.reason for item in ledger.collect()] == [DropReason.DELIVERED]


def test_two_readers_of_one_handoff(ledger: Ledger) -> None:
    insert(ledger, 64, purpose=Purpose.HANDOFF, request_id="r")
    query = chain(64)
    one, two = (
        ledger.lookup(query.digests, 64, duration_s=10, reader="d", handoff_request_id="r")
        for _ in range(2)
    )
    assert one is not None
    assert two is not None
    ledger.release(one.lease_id, delivered=True)
    assert ledger.collect() == [], "still being read"
    assert ledger.lookup(query.digests, 64, duration_s=10, reader="d") is None
    ledger.release(two.lease_id, delivered=True)
    assert len(ledger.collect()) == 1


def test_a_strangers_delivery_leaves_the_handoff(ledger: Ledger) -> None:
    insert(ledger, 64, purpose=Purpose.HANDOFF, request_id="r")
    grant = ledger.lookup(chain(64).digests, 64, duration_s=10, reader="x")
    assert grant is not None
    ledger.release(grant.lease_id, delivered=True)
    assert ledger.collect() == []


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -1.0])
def test_absurd_durations_give_no_long_lease(ledger: Ledger, duration_s: float) -> None:
    insert(ledger, 64)
    grant = ledger.lookup(chain(64).digests, 64, duration_s=duration_s, reader="r")
    assert grant is not None
    assert 0.0 <= grant.duration_s <= ledger.settings.lease_max_s
    assert not ledger.renew(grant.lease_id, duration_s)


def test_a_lease_is_not_renewed_for_ever() -> None:
    now = [0.0]
    ledger = make(clock=lambda: now[0])
    insert(ledger, 64)
    grant = ledger.lookup(chain(64).digests, 64, duration_s=30, reader="stuck")
    assert grant is not None
    total_s = ledger.settings.lease_total_s
    while now[0] < total_s - 30:
        now[0] += 20.0
        assert ledger.renew(grant.lease_id, 30.0)
    assert ledger.renew_for(grant.lease_id, 60.0) == total_s - now[0]
    now[0] = total_s
    assert not ledger.renew(grant.lease_id, 30.0)


def test_groups_have_their_own_block_sizes() -> None:
    ledger = make(block_tokens=(16, 64))
    held = insert(ledger, 130)
    assert held is not None
    assert held.blocks == 9 + 3
    grant = ledger.lookup(chain(70).digests, 70, duration_s=1, reader="r")
    assert grant is not None
    assert [len(row) for row in grant.block_ids] == [4, 1]
    assert grant.tokens == 64


def test_the_placeholder_block_costs_nothing() -> None:
    ledger = make(null_block=0)
    rows = [np.array([0, 0, 7, 8], dtype=np.int32)]
    ledger.insert(chain(128), rows, request_id="", purpose=Purpose.RETAINED, nbytes=1)
    assert ledger.snapshot()["retained_blocks"] == 2
    assert ledger.make_room(10) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "0 rows"),
        ([[1, 2], [3, 4]], "2 rows"),
        ([[1]], "do not cover 64 tokens"),
        ([[[1, 2]]], "do not cover"),
        ([[-1, 2]], "negative"),
    ],
)
def test_block_ids_that_can_not_be_right(
    ledger: Ledger, rows: list[list[int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ledger.insert(chain(64), rows, request_id="", purpose=Purpose.RETAINED, nbytes=1)
    assert ledger.snapshot()["holdings"] == 0
    assert insert(ledger, 64) is not None, "the ledger still works"


@pytest.mark.parametrize("policy", ["ttl", "budgeted"])
def test_a_ledger_that_is_let_go_leaves_nothing_behind(policy: str) -> None:
    """The garbage collector does not see holdings, so a cycle of them would stay for ever."""
    ledger = make(policy=policy)
    rows = [np.arange(first, first + 4, dtype=np.int32) for first in range(0, 40, 4)]
    alive = [weakref.ref(row) for row in rows]
    for number, row in enumerate(rows):
        # Branches and prefixes of one another, below a common part.
        tokens = [0] * 64 + [number // 2] * (16 + number % 2 * 16)
        made = DigestChain.of(tokens, SEED)
        ledger.insert(made, [row], request_id="", purpose=Purpose.RETAINED, nbytes=1)
        handoff = f"handoff {number}"
        ledger.insert(made, [row], request_id=handoff, purpose=Purpose.HANDOFF, nbytes=1)
    ledger.make_room(1)
    grant = ledger.lookup(made.digests, 96, duration_s=10, reader="r")
    assert grant is not None
    assert ledger.snapshot()["holdings"] > 5
    del ledger, grant, row
    rows.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_block_sizes_must_be_whole_groups() -> None:
    with pytest.raises(ConfigError, match="multiple of the digest group"):
        LedgerSettings(cache_blocks=1, block_tokens=(24,))


class Readers:
    """Threads that lease, renew and release without pause."""

    def __init__(self, ledger: Ledger, chains: list[DigestChain]) -> None:
        self.errors: list[BaseException] = []
        self.dropped: set[int] = set()
        self.grants = 0
        self._ledger = ledger
        self._chains = chains
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for query in self._chains:
                    self._read(query)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            self.errors.append(error)

    def _read(self, query: DigestChain) -> None:
        grant = self._ledger.lookup(query.digests, query.num_tokens, duration_s=10, reader="r")
        if grant is None:
            return
        self.grants += 1
        assert grant.holding_id not in self.dropped, "leased after it was dropped"
        self._ledger.renew(grant.lease_id, 1.0)
        assert grant.holding_id not in self.dropped, "dropped while leased"
        self._ledger.release(grant.lease_id, delivered=False)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        assert not self.errors, self.errors
        assert self.grants


def test_all_threads_at_once() -> None:
    """Readers lease while the scheduler inserts, gives up, collects and resets."""
    ledger = make(policy="budgeted", blocks=200, clock=time.monotonic)
    chains = [chain(tokens, begin) for begin in (0, 10_000, 20_000) for tokens in (64, 128, 200)]
    readers = Readers(ledger, chains)

    def collect() -> None:
        for item in ledger.collect():
            assert item.holding.holding_id not in readers.dropped
            assert item.holding.leases == 0
            readers.dropped.add(item.holding.holding_id)

    for turn in range(3000):
        query = chains[turn * 7 % len(chains)]
        blocks = -(-query.num_tokens // BLOCK)
        rows = [np.arange(turn % 50 * 4, turn % 50 * 4 + blocks, dtype=np.int32)]
        ledger.insert(query, rows, request_id="", purpose=Purpose.RETAINED, nbytes=blocks)
        if turn % 5 == 0:
            ledger.make_room(3)
        if turn % 500 == 0:
            ledger.reset()
        collect()
    readers.stop()
    ledger.reset()
    collect()
    shown = ledger.snapshot()
    assert (shown["holdings"], shown["retained_blocks"], shown["leases"]) == (0, 0, 0)
    assert shown["counters"]["inserted.retained"] == len(readers.dropped)
