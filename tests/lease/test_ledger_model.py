"""Random interleavings of everything that can happen to a ledger, against a simple model."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import ClassVar

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.ledger_model import GROUP, Kept, KeptLease, Model, rows

from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import DropReason, Purpose
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.policy.retention import load_retention

BLOCK = 32
CACHE = 24
BLOCK_NBYTES = 1000
TENANTS = ("", "a")
SEEDS = {tenant: chain_seed(b"model", tenant=tenant) for tenant in TENANTS}

# Few, long, forking sequences: most are prefixes of each other up to some point.
at = st.integers(0, 99)
pieces = st.lists(st.sampled_from("xy"), min_size=1, max_size=5)
cuts = st.integers(0, 20)
tenants = st.sampled_from(TENANTS)
seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0])
requests = st.sampled_from(["r0", "r1", "r2"])


def sequence(letters: list[str], cut: int) -> tuple[int, ...]:
    tokens = tuple(ord(letter) for letter in letters for _ in range(20))
    return tokens[: max(1, len(tokens) - cut)]


@lru_cache(maxsize=4096)
def chain(tenant: str, tokens: tuple[int, ...]) -> DigestChain:
    return DigestChain.of(tokens, SEEDS[tenant])


class LedgerMachine(RuleBasedStateMachine):
    policy = "ttl"
    strict = True
    """Whether the policy takes everything that can be made to fit."""
    config: ClassVar[dict[str, object]] = {"decoder_kv_blocks_ttl": 5.0, "budget_fraction": 0.5}

    @initialize()
    def begin(self) -> None:
        self.model = Model(CACHE // 2, lease_max_s=4.0, lease_total_s=6.0)
        self.ledger = Ledger(
            load_retention(self.policy, self.config),
            LedgerSettings(
                cache_blocks=CACHE,
                block_tokens=(BLOCK,),
                handoff_ttl_s=3.0,
                lease_max_s=4.0,
                lease_total_s=6.0,
            ),
            clock=lambda: self.model.now,
        )
        self.block_ids = itertools.count()
        self.owed: list[int] = []
        self.collected: set[int] = set()

    # -- what can happen

    @rule(letters=pieces, cut=cuts, tenant=tenants, share=st.booleans(), data=st.data())
    def retain(
        self, letters: list[str], cut: int, tenant: str, share: bool, data: st.DataObject
    ) -> None:
        tokens = sequence(letters, cut)
        blocks = self.blocks_for(tenant, tokens, share=share)
        before = self.model.prefixes(tenant, tokens)
        self.model.expire()
        before = [kept for kept in before if kept in self.model.kept and kept.ending is None]
        retained = self.model.retained_blocks()
        holding = self.ledger.insert(
            chain(tenant, tokens),
            rows(blocks),
            request_id="",
            purpose=Purpose.RETAINED,
            nbytes=BLOCK_NBYTES * len(blocks),
            tenant=tenant,
        )
        self.follow_victims()
        if holding is None:
            self.check_refusal(tokens, blocks, retained)
            return
        for kept in before:
            self.model.end(kept, DropReason.SUPERSEDED)
        self.model.kept.append(
            Kept(
                holding.holding_id,
                "",
                tenant,
                tokens,
                Purpose.RETAINED,
                frozenset(blocks),
                self.model.now + 5.0,
            )
        )

    def check_refusal(self, tokens: tuple[int, ...], blocks: list[int], retained: set[int]) -> None:
        """Only what is too short, or can't fit beside leased holdings, is refused by this policy.

        Nothing may have been given up for it.
        """
        leased = {
            b for kept in self.model.kept if kept.retained and kept.leases for b in kept.blocks
        }
        if not self.strict:
            return
        short = len(tokens) < GROUP
        assert short or len(leased | set(blocks)) > self.model.budget, "refused without need"
        assert self.model.retained_blocks() == retained, "given up for what was refused"

    @rule(letters=pieces, cut=cuts, tenant=tenants, request=requests, known=st.none() | at)
    def hand_off(
        self, letters: list[str], cut: int, tenant: str, request: str, known: int | None
    ) -> None:
        tokens = sequence(letters, cut)
        if known is not None and self.model.kept:
            kept = self.model.kept[known % len(self.model.kept)]
            tenant, tokens = kept.tenant, kept.tokens
        blocks = self.blocks_for(tenant, tokens, share=False)
        self.model.expire()
        holding = self.ledger.insert(
            chain(tenant, tokens),
            rows(blocks),
            request_id=request,
            purpose=Purpose.HANDOFF,
            nbytes=BLOCK_NBYTES * len(blocks),
            tenant=tenant,
        )
        assert holding is not None
        older = self.model.handoff(request)
        if older is not None:
            self.model.end(older, DropReason.SUPERSEDED)
        self.model.kept.append(
            Kept(
                holding.holding_id,
                request,
                tenant,
                tokens,
                Purpose.HANDOFF,
                frozenset(blocks),
                self.model.now + 3.0,
            )
        )

    @rule(
        letters=pieces,
        cut=cuts,
        tenant=tenants,
        duration_s=seconds,
        request=st.sampled_from(["", "r0", "r1", "r2"]),
        least=st.sampled_from([0, 0, 0, 40]),
        known=st.none() | at,
    )
    def look_up(
        self,
        letters: list[str],
        cut: int,
        tenant: str,
        duration_s: float,
        request: str,
        least: int,
        known: int | None,
    ) -> None:
        tokens = sequence(letters, cut)
        if known is not None and self.model.kept:
            # Ask for what is there, not only for what might be.
            kept = self.model.kept[known % len(self.model.kept)]
            tenant, tokens = kept.tenant, kept.tokens
        self.model.expire()
        query = chain(tenant, tokens)
        grant = self.ledger.lookup(
            query.digests,
            len(tokens),
            duration_s=duration_s,
            reader="reader",
            handoff_request_id=request,
            min_tokens=least,
        )
        groups = self.model.longest(tenant, tokens)
        named = self.model.handoff(request) if request else None
        if grant is None:
            assert groups * GROUP <= least
            return
        kept = next(k for k in self.model.kept if k.holding_id == grant.holding_id)
        note(f"granted {grant.tokens}+{grant.tail_tokens} of {len(kept.tokens)}")
        assert grant.tokens + grant.tail_tokens > least
        assert kept.ending is None
        assert grant.tokens == groups * GROUP
        assert self.model.shared(kept, tenant, tokens) == groups
        if named is not None and self.model.shared(named, tenant, tokens) == groups:
            assert kept is named
        self.check_tail(kept, tenant, tokens, grant.tokens, grant.tail_tokens, grant.tail_digest)
        covered = -(-(grant.tokens + grant.tail_tokens) // BLOCK)
        assert len(grant.block_ids[0]) == covered
        assert set(grant.block_ids[0].tolist()) <= kept.blocks
        end = self.model.lease_end(duration_s, self.model.now)
        assert self.model.now + grant.duration_s == end
        self.model.leases[grant.lease_id] = KeptLease(kept, request, self.model.now, end)
        kept.leases.add(grant.lease_id)

    @staticmethod
    def check_tail(
        kept: Kept, tenant: str, tokens: tuple[int, ...], full: int, tail: int, digest: bytes
    ) -> None:
        rest = len(kept.tokens) - full
        if 0 < rest < GROUP and len(tokens) - full >= rest:
            assert tail == rest
            own = chain(tenant, tokens).tail_digest(full // GROUP, tail)
            agrees = kept.tenant == tenant and kept.tokens == tokens[: len(kept.tokens)]
            assert (own == digest) == agrees
        else:
            assert (tail, digest) == (0, b"")

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), duration_s=seconds)
    def renew(self, data: st.DataObject, duration_s: float) -> None:
        # Lease ids are random: choose by position, so that a failure can be replayed.
        lease_id = list(self.model.leases)[data.draw(at) % len(self.model.leases)]
        self.model.expire()
        lease = self.model.leases.get(lease_id)
        left_s = self.ledger.renew_for(lease_id, duration_s)
        if lease is None:
            assert left_s == 0.0
            return
        end = self.model.lease_end(duration_s, lease.began_s)
        lease.expires_s = max(lease.expires_s, end)
        assert self.model.now + left_s == lease.expires_s

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), delivered=st.booleans())
    def release(self, data: st.DataObject, delivered: bool) -> None:
        # Lease ids are random: choose by position, so that a failure can be replayed.
        lease_id = list(self.model.leases)[data.draw(at) % len(self.model.leases)]
        self.model.expire()
        lease = self.model.leases.get(lease_id)
        assert self.ledger.release(lease_id, delivered=delivered) == (lease is not None)
        if lease is None:
            return
        self.model.end_lease(lease_id)
        named = self.model.handoff(lease.handoff) if lease.handoff else None
        if delivered and named is not None:
            self.model.end(named, DropReason.DELIVERED)

    @rule()
    def release_unknown(self) -> None:
        self.model.expire()
        assert not self.ledger.release(12345, delivered=True)
        assert not self.ledger.renew(12345, 1.0)

    @rule(step_s=st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0, 100.0]))
    def time_passes(self, step_s: float) -> None:
        self.model.now += step_s

    @rule()
    def expire(self) -> None:
        self.model.expire()
        self.ledger.expire()

    @rule(blocks=st.integers(0, CACHE))
    def pressure(self, blocks: int) -> None:
        self.model.expire()
        before = self.model.retained_blocks()
        freed = self.ledger.make_room(blocks)
        self.follow_victims()
        assert freed == len(before - self.model.retained_blocks())
        if freed < blocks:
            live = [k for k in self.model.kept if k.retained and not k.leases]
            assert not live, "room was denied although something could be given up"

    @rule()
    def collect(self) -> None:
        self.model.expire()
        for dropped in self.ledger.collect():
            holding_id = dropped.holding.holding_id
            assert holding_id not in self.collected, "collected twice"
            self.collected.add(holding_id)
            assert self.model.dropped.pop(holding_id) is dropped.reason
        assert not self.model.dropped, "never collected"

    @rule()
    def reset(self) -> None:
        self.model.expire()
        empty = self.ledger.reset()
        for kept in list(self.model.kept):
            self.model.end(kept, DropReason.RESET)
        assert empty == (not self.model.kept)

    @rule(request=requests)
    def withdraw(self, request: str) -> None:
        # Withdrawing looks at no clock: what is overdue may still be withdrawn.
        self.model.expire()
        self.ledger.expire()
        named = self.model.handoff(request)
        assert self.ledger.withdraw(request) == (named is not None)
        if named is not None:
            self.model.end(named, DropReason.WITHDRAWN)

    # -- helpers

    def blocks_for(self, tenant: str, tokens: tuple[int, ...], *, share: bool) -> list[int]:
        """Block ids; full blocks of a held prefix may be shared, as a prefix cache does."""
        need = -(-len(tokens) // BLOCK)
        blocks: list[int] = []
        if share:
            for kept in self.model.kept:
                common = self.model.shared(kept, tenant, tokens) * GROUP // BLOCK
                if common > len(blocks):
                    blocks = sorted(kept.blocks)[:common]
        return blocks + [next(self.block_ids) for _ in range(need - len(blocks))]

    def follow_victims(self) -> None:
        """Tell the model whom the policy chose."""
        for dropped in self.ledger._dropped:
            chosen = dropped.reason in (DropReason.PRESSURE, DropReason.BUDGET)
            if chosen and dropped.holding.holding_id not in self.model.dropped:
                self.model.gave_up(dropped)

    # -- what must always be true

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.model.expire()
        shown = self.ledger.snapshot()
        blocks = self.model.retained_blocks()
        assert shown["retained_blocks"] == len(blocks) <= self.model.budget
        assert shown["holdings"] == len(self.model.kept)
        assert shown["retained"] == sum(kept.retained for kept in self.model.kept)
        assert shown["leases"] == len(self.model.leases)
        assert shown["retained_nbytes"] == BLOCK_NBYTES * len(blocks)
        if "tenants" in shown["retention"]:
            counted = sum(row["blocks"] for row in shown["retention"]["tenants"].values())
            assert counted == len(blocks)
        assert shown["index_nodes"] <= 2 * len(self.model.kept)
        assert shown["to_collect"] == len(self.model.dropped)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.model.now += 1000.0
        self.collect()
        assert self.ledger.snapshot()["holdings"] == 0
        assert self.ledger.snapshot()["retained_blocks"] == 0
        assert self.ledger.snapshot()["index_nodes"] == 0


class BudgetedMachine(LedgerMachine):
    policy = "budgeted"
    strict = False


class QuotaMachine(BudgetedMachine):
    config: ClassVar[dict[str, object]] = {
        **LedgerMachine.config,
        "tenant_quotas": {"a": 0.4},
        "soft_hold_s": 2.0,
    }


TestTtl = LedgerMachine.TestCase
TestBudgeted = BudgetedMachine.TestCase
TestQuotas = QuotaMachine.TestCase
TestTtl.settings = TestBudgeted.settings = TestQuotas.settings = settings(
    max_examples=150, stateful_step_count=40
)
