from __future__ import annotations

import math
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransport.errors import ConfigError, UnknownOptionError
from kvtransport.lease.digest import DigestChain, chain_seed
from kvtransport.lease.holding import Dropped, DropReason, Holding, Purpose
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.policy import options
from kvtransport.policy.pools import Pool
from kvtransport.policy.retention import RetentionPolicy, load_retention
from kvtransport.policy.returns import ReturnModel
from kvtransport.policy.shares import _Order

BLOCK = 16
SEED = chain_seed(b"retention")


class Cache:
    """A ledger with a clock, and blocks that are never used twice."""

    def __init__(self, policy: str, blocks: int = 100, **config: object) -> None:
        self.now = 0.0
        self.policy: RetentionPolicy = load_retention(policy, {"budget_fraction": 1.0, **config})
        settings = LedgerSettings(cache_blocks=blocks, block_tokens=(BLOCK,))
        self.ledger = Ledger(self.policy, settings, clock=lambda: self.now)
        self._block = 0
        self._token = 0

    def tokens(self, blocks: int) -> list[int]:
        """Tokens that nobody else has."""
        self._token += 1
        return [self._token] * (blocks * BLOCK)

    def retain(
        self, tokens: list[int], *, tenant: str = "", saved_s: float = 0.0, nbytes: int = 0
    ) -> Holding | None:
        blocks = -(-len(tokens) // BLOCK)
        self._block += blocks
        return self.ledger.insert(
            DigestChain.of(tokens, SEED),
            [np.arange(self._block - blocks, self._block, dtype=np.int32)],
            request_id="",
            purpose=Purpose.RETAINED,
            nbytes=nbytes or blocks * 1000,
            tenant=tenant,
            saved_s=saved_s,
        )

    def read(self, tokens: list[int]) -> int:
        chain = DigestChain.of(tokens, SEED)
        grant = self.ledger.lookup(chain.digests, len(tokens), duration_s=10, reader="r")
        assert grant is not None
        return grant.lease_id

    def dropped(self) -> list[Dropped]:
        return self.ledger.collect()


def ids(dropped: list[Dropped]) -> list[int]:
    return [item.holding.holding_id for item in dropped]


# -- off and ttl


def test_off_keeps_nothing_but_handoffs() -> None:
    cache = Cache("off")
    assert cache.retain(cache.tokens(1)) is None
    assert cache.ledger.snapshot()["counters"]["refused.policy"] == 1


def test_ttl_is_upstreams_default() -> None:
    cache = Cache("ttl")
    cache.retain(cache.tokens(1))
    cache.now = 479.999
    assert cache.dropped() == []
    cache.now = 480.0
    assert [item.reason for item in cache.dropped()] == [DropReason.EXPIRED]


def test_ttl_gives_up_the_least_recently_used() -> None:
    cache = Cache("ttl", blocks=3)
    texts = [cache.tokens(1) for _ in range(4)]
    held = [cache.retain(text) for text in texts[:3]]
    cache.ledger.release(cache.read(texts[0]), delivered=True)
    cache.retain(texts[3])
    assert ids(cache.dropped()) == [held[1].holding_id]


@pytest.mark.parametrize("policy", ["ttl", "budgeted"])
def test_budget_is_the_smaller_of_fraction_and_blocks(policy: str) -> None:
    for config, budget in (
        ({"budget_fraction": 0.25}, 25),
        ({"budget_fraction": 0.25, "budget_blocks": 10}, 10),
        ({"budget_fraction": 0.25, "budget_blocks": 50}, 25),
        ({"budget_fraction": 0.0}, 0),
    ):
        assert Cache(policy, 100, **config).ledger.snapshot()["budget_blocks"] == budget


@pytest.mark.parametrize("policy", ["ttl", "budgeted"])
def test_larger_than_the_budget_is_refused_and_pushes_nothing_out(policy: str) -> None:
    cache = Cache(policy, blocks=4)
    cache.retain(cache.tokens(2))
    assert cache.retain(cache.tokens(5)) is None
    assert cache.dropped() == []


@pytest.mark.parametrize("policy", ["ttl", "budgeted"])
def test_leased_holdings_are_no_victims(policy: str) -> None:
    cache = Cache(policy, blocks=2)
    texts = [cache.tokens(1) for _ in range(3)]
    cache.retain(texts[0])
    kept = cache.retain(texts[1])
    cache.read(texts[0])
    assert cache.ledger.make_room(10) == 1
    assert ids(cache.dropped()) == [kept.holding_id]
    assert cache.retain(texts[2]) is not None
    assert cache.retain(cache.tokens(2)) is None
    assert cache.ledger.snapshot()["counters"]["refused.over_budget"] == 1


@pytest.mark.parametrize("policy", ["ttl", "budgeted"])
def test_shared_blocks_count_once(policy: str) -> None:
    cache = Cache(policy, blocks=4)
    common = np.arange(3, dtype=np.int32)
    for at in range(2):
        chain = DigestChain.of([0] * 48 + [at + 1] * 16, SEED)
        rows = [np.append(common, np.int32(3 + at))]
        held = cache.ledger.insert(chain, rows, request_id="", purpose=Purpose.RETAINED, nbytes=4)
        assert (held is None) == (at == 1 and policy == "none")
    shown = cache.ledger.snapshot()
    assert shown["retained_blocks"] == 4
    assert shown["retained"] == 1, "five distinct blocks do not fit into four"


# -- value


def test_less_saving_per_byte_goes_first() -> None:
    cache = Cache("budgeted", blocks=100)
    long, short, plain = (cache.tokens(2) for _ in range(3))
    dear = cache.retain(long, saved_s=10.0)
    cheap = cache.retain(short, saved_s=0.1)
    bulky = cache.retain(plain, saved_s=10.0, nbytes=2_000_000)
    order = []
    for _ in range(3):
        cache.ledger.make_room(1)
        order += ids(cache.dropped())
    assert order == [bulky.holding_id, cheap.holding_id, dear.holding_id]


def test_who_stayed_away_longest_goes_first() -> None:
    cache = Cache("budgeted")
    held = []
    for _ in range(3):
        held.append(cache.retain(cache.tokens(1)).holding_id)
        cache.now += 30.0
    order = []
    for _ in range(3):
        cache.ledger.make_room(1)
        order += ids(cache.dropped())
    assert order == held


def test_a_newcomer_worth_less_than_all_others_is_refused() -> None:
    cache = Cache("budgeted", blocks=4)
    cache.retain(cache.tokens(2), saved_s=10.0)
    cache.retain(cache.tokens(2), saved_s=10.0)
    assert cache.retain(cache.tokens(2), saved_s=0.01) is None
    assert cache.ledger.snapshot()["counters"]["refused.not_worth"] == 1
    assert cache.dropped() == []
    assert cache.retain(cache.tokens(2), saved_s=10.0) is not None


def test_conversations_that_returned_are_kept_longer() -> None:
    """Taught that second turns come back and first ones don't."""
    cache = Cache("budgeted")
    for _ in range(100):
        cache.policy.returns.lapsed(0, 400.0)
        cache.policy.returns.returned(1, 20.0)
    old = cache.tokens(2)
    cache.retain(old)
    turn_2 = cache.retain([*old, *([9] * 32)])
    cache.dropped()
    cache.now += 60.0
    turn_1 = cache.retain(cache.tokens(4))
    cache.ledger.make_room(1)
    assert ids(cache.dropped()) == [turn_1.holding_id], "although it is newer"
    assert turn_2.turns == 1


def test_worth_changes_with_time() -> None:
    """First turns come back at once or never, second ones late."""
    cache = Cache("budgeted")
    for _ in range(200):
        cache.policy.returns.returned(0, 5.0)
        cache.policy.returns.lapsed(0, 480.0)
        cache.policy.returns.returned(1, 300.0)
        for _ in range(3):
            cache.policy.returns.lapsed(1, 480.0)
    old = cache.tokens(2)
    cache.retain(old)
    turn_2 = cache.retain([*old, *([9] * 32)])
    turn_1 = cache.retain(cache.tokens(4))
    assert cache.policy.victim(0.0, None) is turn_2
    assert cache.policy.victim(60.0, None) is turn_1


def test_returns_are_learned_from_lookups_and_supersession() -> None:
    cache = Cache("budgeted")
    text = cache.tokens(2)
    cache.retain(text)
    cache.now = 30.0
    lease = cache.read(text)
    cache.ledger.release(lease, delivered=True)
    cache.retain([*text, *([9] * 16)])
    cache.now = 40.0
    cache.retain([*text, *([9] * 32)])
    cache.now = 1000.0
    cache.ledger.expire()
    shown = cache.ledger.snapshot()["retention"]["returns"]
    assert shown["first_turn"]["observations"] == 1
    assert shown["first_turn"]["median_think_s"] == pytest.approx(32.0)
    assert shown["second_turn"]["observations"] == 1
    assert shown["later_turns"]["observations"] == 1
    assert shown["later_turns"]["median_think_s"] is None


# -- soft hold


def test_soft_hold_until_the_next_turn_was_admitted() -> None:
    cache = Cache("budgeted", blocks=100)
    text = cache.tokens(2)
    read = cache.retain(text)
    other = cache.retain(cache.tokens(2))
    cache.ledger.release(cache.read(text), delivered=True)
    cache.ledger.make_room(1)
    assert ids(cache.dropped()) == [other.holding_id], "although it was used later"
    newer = cache.retain(cache.tokens(2))
    cache.ledger.note_admitted(DigestChain.of([*text, *([9] * 40)], SEED).digests)
    cache.now += 1.0
    cache.policy.returns.returned(0, 1.0)
    for _ in range(200):
        cache.policy.returns.lapsed(1, 400.0)
    cache.ledger.make_room(1)
    assert ids(cache.dropped()) == [read.holding_id]
    assert newer is not None


def test_soft_hold_ends_by_itself_and_yields_to_live_requests() -> None:
    cache = Cache("budgeted", blocks=2, soft_hold_s=30.0)
    text = cache.tokens(2)
    held = cache.retain(text)
    cache.ledger.release(cache.read(text), delivered=True)
    assert cache.retain(cache.tokens(2)) is None, "no other conversation pushes it out"
    cache.now = 30.0
    assert cache.retain(cache.tokens(2), saved_s=100.0) is not None
    assert ids(cache.dropped()) == [held.holding_id]

    again = cache.tokens(2)
    cache.ledger.make_room(2)
    held = cache.retain(again)
    cache.ledger.release(cache.read(again), delivered=True)
    assert cache.ledger.make_room(2) == 2, "a live request comes first"


def test_a_conversation_that_does_not_come_is_soft_once_whoever_reads_its_beginning() -> None:
    """Else others with its system prompt would keep it for ever, and be refused for it."""
    cache = Cache("budgeted", blocks=40, soft_hold_s=30.0)
    common = cache.tokens(1)
    dead = [*common, *cache.tokens(34)]
    held = cache.retain(dead)
    cache.ledger.release(cache.read(dead), delivered=True)
    kept = []
    for _ in range(8):
        cache.now += 13.0
        other = [*common, *cache.tokens(9)]
        cache.ledger.release(cache.read(other), delivered=True)
        kept.append(cache.retain(other, saved_s=100.0) is not None)
    assert kept[:2] == [False, False], "soft for 30 s"
    assert all(kept[2:])
    assert held.holding_id in ids(cache.dropped())


# -- tenants


def test_a_growing_conversation_counts_whole_for_its_tenant() -> None:
    cache = Cache("budgeted", blocks=100, tenant_quotas={"a": 0.5})
    blocks: list[int] = []
    text: list[int] = []
    for turn in range(4):
        text = [*text, *([turn + 1] * (8 * BLOCK))]
        blocks = [*blocks, *range(len(blocks), len(blocks) + 8)]
        cache.ledger.insert(
            DigestChain.of(text, SEED),
            [np.array(blocks, dtype=np.int32)],
            request_id="",
            purpose=Purpose.RETAINED,
            nbytes=1,
            tenant="a",
        )
        shown = cache.ledger.snapshot()
        assert shown["retention"]["tenants"]["a"]["blocks"] == len(blocks)
        assert shown["retained"] == 1


QUOTAS = {"a": 0.5, "b": 0.25}


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.floats(0.01, 10)), max_size=60
    )
)
def test_nobody_pushes_out_anothers_share(inserts: list[tuple[str, int, float]]) -> None:
    cache = Cache("budgeted", blocks=16, tenant_quotas=QUOTAS)
    used = dict.fromkeys("abcd", 0)
    for tenant, blocks, saved_s in inserts:
        held = cache.retain(cache.tokens(blocks), tenant=tenant, saved_s=saved_s)
        if held is not None:
            used[tenant] += blocks
        for item in cache.dropped():
            victim, size = item.holding.tenant, item.holding.blocks
            share = 16 * QUOTAS.get(victim, 0.25)
            pool = used[victim] if victim in QUOTAS else used["c"] + used["d"]
            same = victim == tenant or not ({victim, tenant} & set(QUOTAS))
            assert same or pool > share, f"{tenant} pushed out {victim}, who was within its share"
            used[victim] -= size
        assert sum(used.values()) <= 16
        cache.now += 1.0


def test_a_share_that_others_leave_may_be_used_and_is_given_back() -> None:
    cache = Cache("budgeted", blocks=8, tenant_quotas={"a": 0.5, "b": 0.5})
    for _ in range(8):
        assert cache.retain(cache.tokens(1), tenant="a") is not None
    for _ in range(6):
        cache.retain(cache.tokens(1), tenant="b")
    dropped = [item.holding.tenant for item in cache.dropped()]
    assert dropped == ["a"] * 4 + ["b"] * 2
    shown = cache.ledger.snapshot()["retention"]["tenants"]
    assert shown == {"a": {"blocks": 4, "share": 0.5}, "b": {"blocks": 4, "share": 0.5}}


def test_leased_holdings_of_one_do_not_cost_another_its_share() -> None:
    cache = Cache("budgeted", blocks=16, tenant_quotas=QUOTAS)
    texts = [cache.tokens(1) for _ in range(8)]
    for text in texts:
        cache.retain(text, tenant="b")
    for _ in range(8):
        cache.retain(cache.tokens(1), tenant="a")
    for text in texts:
        cache.read(text)
    assert cache.retain(cache.tokens(1), tenant="c") is None
    assert cache.retain(cache.tokens(1), tenant="a") is not None, "pushes out its own"
    assert [item.holding.tenant for item in cache.dropped()] == ["a"]


def test_every_unlisted_tenant_can_have_a_share_of_its_own() -> None:
    cache = Cache("budgeted", blocks=8, default_tenant_quota=0.25)
    for tenant in "aaaaaaaabbcc":
        cache.retain(cache.tokens(1), tenant=tenant)
    assert {item.holding.tenant for item in cache.dropped()} == {"a"}


def test_a_listed_share_is_there_however_many_others_there_are() -> None:
    """Tenants make themselves up, so many that their default shares exceed the budget."""
    cache = Cache("budgeted", blocks=20, tenant_quotas={"a": 0.5}, default_tenant_quota=0.1)
    for tenant in range(10):
        for _ in range(2):
            assert cache.retain(cache.tokens(1), tenant=f"other {tenant}") is not None
    for _ in range(10):
        assert cache.retain(cache.tokens(1), tenant="a") is not None
    dropped = [item.holding.tenant for item in cache.dropped()]
    assert len(dropped) == 10
    assert "a" not in dropped
    assert max(dropped.count(tenant) for tenant in dropped) == 1, "all others lose alike"
    shown = cache.ledger.snapshot()["retention"]["tenants"]
    assert shown["a"] == {"blocks": 10, "share": 0.5}
    assert {row["share"] for name, row in shown.items() if name != "a"} == {0.05}


def test_blocks_that_a_tenants_conversations_share_count_once_for_its_share() -> None:
    """Ten conversations on one system prompt take 40 blocks, not 220."""
    cache = Cache("budgeted", blocks=200, tenant_quotas={"a": 0.5})
    common = np.arange(20, dtype=np.int32)
    cache._block = 20
    for at in range(10):
        own = np.arange(cache._block, cache._block + 2, dtype=np.int32)
        cache._block += 2
        cache.ledger.insert(
            DigestChain.of([0] * (20 * BLOCK) + [at + 1] * (2 * BLOCK), SEED),
            [np.concatenate((common, own))],
            request_id="",
            purpose=Purpose.RETAINED,
            nbytes=1,
            tenant="a",
        )
    for _ in range(40):
        cache.retain(cache.tokens(10), tenant="b")
    shown = cache.ledger.snapshot()["retention"]["tenants"]
    assert shown == {"a": {"blocks": 40, "share": 0.5}, "(others)": {"blocks": 160, "share": 0.5}}
    assert {item.holding.tenant for item in cache.dropped()} == {"b"}
    cache.ledger.reset()
    assert cache.policy._pools == {}


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 4)), max_size=60),
    st.sampled_from([0.0, 0.05, 0.125, 0.5]),
)
def test_who_is_within_its_share_finds_room(inserts: list[tuple[str, int]], default: float) -> None:
    cache = Cache("budgeted", blocks=16, tenant_quotas=QUOTAS, default_tenant_quota=default)
    used = dict.fromkeys("abcdefgh", 0)
    for tenant, blocks in inserts:
        held = cache.retain(cache.tokens(blocks), tenant=tenant, saved_s=1.0)
        if held is not None:
            used[tenant] += blocks
        for item in cache.dropped():
            victim, size = item.holding.tenant, item.holding.blocks
            assert victim == tenant or victim not in QUOTAS or used[victim] > 16 * QUOTAS[victim]
            used[victim] -= size
        if tenant in QUOTAS and used[tenant] + (0 if held else blocks) <= 16 * QUOTAS[tenant]:
            assert held is not None
        assert sum(used.values()) <= 16
        cache.now += 1.0


def test_tenants_within_their_shares_are_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache("budgeted", blocks=1000, tenant_quotas={"a": 0.2}, default_tenant_quota=0.01)
    for at in range(990):
        cache.retain(cache.tokens(1), tenant="b" if at < 190 else f"other {at}")
    looked_at = 0
    skip = _Order.skip

    def counted(order: _Order, pool: Pool) -> None:
        nonlocal looked_at
        looked_at += 1
        skip(order, pool)

    monkeypatch.setattr(_Order, "skip", counted)
    for _ in range(20):
        assert cache.retain(cache.tokens(1), tenant="a") is not None
    assert len(cache.dropped()) == 10
    assert looked_at == 10, "one pool per victim"


def test_pressure_takes_from_whoever_is_furthest_over_its_share() -> None:
    cache = Cache("budgeted", blocks=100, tenant_quotas={"a": 0.5, "b": 0.1})
    for tenant in "aaaabb":
        cache.retain(cache.tokens(1), tenant=tenant, saved_s=100.0 if tenant == "b" else 0.1)
    taken = []
    for _ in range(6):
        cache.ledger.make_room(1)
        taken += [item.holding.tenant for item in cache.dropped()]
    assert taken == ["b", "b", "a", "a", "a", "a"] or taken[0] == "b"
    assert cache.ledger.snapshot()["retained"] == 0


def test_thousands_of_tenants_leave_nothing_behind() -> None:
    cache = Cache("budgeted", blocks=100, default_tenant_quota=0.01)
    for at in range(5000):
        cache.retain(cache.tokens(1), tenant=f"tenant {at}")
        cache.dropped()
    assert len(cache.policy._pools) <= 100
    assert len(cache.policy._shares._others._heap) <= 500
    cache.ledger.reset()
    assert len(cache.policy._pools) == 0


@pytest.mark.parametrize(
    ("made_s", "read_s"), [((0, 0), (100, 300)), ((0, 300), (400, 400))], ids=["age", "expiry"]
)
def test_the_next_in_a_queue_is_priced_for_itself(
    made_s: tuple[int, int], read_s: tuple[int, int]
) -> None:
    """Whatever is remembered of the one before it in the same queue."""
    cache = Cache("budgeted", soft_hold_s=0.0)
    events = sorted(
        [(when, at, cache.retain) for at, when in enumerate(made_s)]
        + [(when, at, cache.read) for at, when in enumerate(read_s)],
        key=lambda event: event[0],
    )
    texts = [cache.tokens(1) for _ in range(3)]
    held = {}
    for when, at, what in events:
        cache.now = float(when)
        if what == cache.read:
            cache.ledger.release(cache.read(texts[at]), delivered=True)
        else:
            held[at] = cache.retain(texts[at], saved_s=1.0)
    cache.now = now = 431.0
    chance = cache.policy.returns.chance
    ages = [now - when for when in read_s]
    least, most = (chance(1, age, made_s[at] + 480.0 - now) for at, age in enumerate(ages))
    assert least < most
    saved_s = math.sqrt(least * most) / chance(0, 0.0, 480.0)
    between = cache.retain(texts[2], saved_s=saved_s)
    for _ in range(3):
        cache.ledger.make_room(1)
    expected = [held[0], between, held[1]]
    assert ids(cache.dropped()) == [holding.holding_id for holding in expected]


# -- think times


def test_chance_falls_with_age_and_grows_with_time_left() -> None:
    model = ReturnModel()
    for think in (5, 8, 13, 20, 33, 70, 150):
        model.returned(0, think)
    for _ in range(7):
        model.lapsed(0, 480.0)
    ages = [0, 1, 10, 30, 60, 120, 240, 479]
    chances = [model.chance(0, age, 480.0 - age) for age in ages]
    assert chances == sorted(chances, reverse=True)
    assert model.chance(0, 10, 20) < model.chance(0, 10, 200)
    assert 0.4 < chances[0] < 0.65, "seven of fourteen came back"


def test_giving_up_early_does_not_look_like_staying_away() -> None:
    """Censoring: half return at 60 s, but most holdings are dropped at 10 s."""
    random = np.random.default_rng(3)
    model = ReturnModel()
    for at in range(2000):
        returns = random.random() < 0.5
        if at % 4:
            model.lapsed(0, 10.0)
        elif returns:
            model.returned(0, 60.0)
        else:
            model.lapsed(0, 480.0)
    assert model.chance(0, 0.0, 480.0) == pytest.approx(0.5, abs=0.07)


def test_new_habits_replace_old_ones() -> None:
    model = ReturnModel()
    for _ in range(5000):
        model.lapsed(0, 480.0)
    assert model.chance(0, 0.0, 480.0) < 0.05
    for _ in range(12_000):
        model.returned(0, 20.0)
    assert model.chance(0, 0.0, 480.0) > 0.8


def test_classes_are_apart() -> None:
    model = ReturnModel()
    for _ in range(50):
        model.lapsed(0, 480.0)
        model.returned(7, 20.0)
    assert model.chance(0, 0.0, 480.0) < 0.15
    assert model.chance(2, 0.0, 480.0) > 0.8


@given(st.integers(0, 5), st.floats(0, 1e9), st.floats(0, 1e9))
def test_chance_is_a_probability(turns: int, age_s: float, left_s: float) -> None:
    model = ReturnModel()
    model.returned(turns, age_s)
    model.lapsed(turns, left_s)
    assert 0.0 <= model.chance(turns, age_s, left_s) <= 1.0


@pytest.mark.parametrize("age_s", [0.0, -1.0, math.nan, 1e300])
def test_strange_ages_are_harmless(age_s: float) -> None:
    model = ReturnModel()
    model.returned(0, age_s)
    assert 0.0 <= model.chance(0, age_s, 10.0) <= 1.0


# -- configuration


@pytest.mark.parametrize("name", ["off", "ttl", "budgeted"])
def test_policies_by_name(name: str) -> None:
    policy = load_retention(name, {"decoder_kv_blocks_ttl": 10, "budget_fraction": 0.1})
    assert isinstance(policy, RetentionPolicy)
    assert policy.describe()


@pytest.mark.parametrize(
    ("name", "config", "error", "named"),
    [
        ("budget", {}, ConfigError, "did you mean 'budgeted'"),
        ("ttl", {"decoder_kv_block_ttl": 1}, UnknownOptionError, "decoder_kv_blocks_ttl"),
        ("off", {"budgetfraction": 1}, UnknownOptionError, "budget_fraction"),
        ("ttl", {"budget_fraction": 1.5}, ConfigError, "budget_fraction"),
        ("ttl", {"budget_fraction": math.nan}, ConfigError, "budget_fraction"),
        ("ttl", {"budget_blocks": -1}, ConfigError, "budget_blocks"),
        ("ttl", {"budget_blocks": "many"}, ConfigError, "budget_blocks"),
        ("ttl", {"decoder_kv_blocks_ttl": -1}, ConfigError, "decoder_kv_blocks_ttl"),
        ("budgeted", {"tenant_quotas": {"a": 0.7, "b": 0.7}}, ConfigError, "tenant_quotas"),
        ("budgeted", {"tenant_quotas": {"a": 0}}, ConfigError, "tenant_quotas"),
        ("budgeted", {"soft_hold_s": -1}, ConfigError, "soft_hold_s"),
    ],
)
def test_bad_configuration_is_named(
    name: str, config: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        load_retention(name, config)


def test_third_party_policy_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("newest", "support.third_party:NewestFirst", "kvtransport.retention")
    monkeypatch.setattr(options, "entry_points", lambda group: [point])
    cache = Cache("newest", blocks=2)
    kept = [cache.retain(cache.tokens(1)) for _ in range(2)]
    cache.ledger.make_room(1)
    assert ids(cache.dropped()) == [kept[1].holding_id]
