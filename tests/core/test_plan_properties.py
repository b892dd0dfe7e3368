"""Merging and splitting never change which bytes move."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loopback import CAPABILITIES, Loopback

from kvtransport.agent import Agent
from kvtransport.backend import Blocks, Op
from kvtransport.errors import DescriptorError
from kvtransport.layout.blocks import BlockTable, Pair
from kvtransport.layout.merge import index_runs
from kvtransport.layout.split import split_blocks
from kvtransport.layout.vector import as_vector

SIZE = 4096


@pytest.fixture(scope="module")
def pair_of_agents():
    here, there = Agent(Loopback(), name="p"), Agent(Loopback(), name="q")
    for name in ("one", "two"):
        here.register(bytearray(SIZE), name=name)
        there.register(bytearray(SIZE), name=name)
    peer = here.add_peer(there.metadata())
    yield here, peer
    here.close()
    there.close()


def moves(parts: tuple[Blocks, ...]) -> dict[tuple[int, int], tuple[int, int]]:
    """Destination byte -> source byte."""
    found = {}
    for part in parts:
        for lr, lo, rr, ro, n in zip(
            *(getattr(part, f).tolist() for f in Blocks.__slots__), strict=True
        ):
            for i in range(n):
                assert (lr, lo + i) not in found
                found[lr, lo + i] = (rr, ro + i)
    return found


@st.composite
def block_lists(draw):
    count = draw(st.integers(1, 24))
    block = draw(st.integers(1, 40))
    gap = draw(st.sampled_from([0, 0, 3]))
    base = draw(st.integers(0, 50))
    n = draw(st.integers(0, count))
    order = st.permutations(range(count))
    local = draw(order)[:n]
    remote = draw(order)[:n] if draw(st.booleans()) else sorted(draw(order)[:n])
    if draw(st.booleans()):
        local = sorted(local)
    return base, block, block + gap, count, local, remote


@settings(deadline=None)
@given(case=block_lists(), tables=st.integers(1, 2), as_array=st.booleans())
def test_merging_blocks_keeps_the_bytes(pair_of_agents, case, tables, as_array):
    here, peer = pair_of_agents
    base, block, stride, count, local, remote = case
    if as_array:
        local, remote = np.array(local, np.int64), np.array(remote, np.int64)
    expected, pairs = {}, []
    for region in here.regions[:tables]:
        theirs = peer.region(region.name)
        pairs.append(
            Pair.blocks(
                BlockTable(region, base, stride, block, count),
                BlockTable(theirs, 0, stride, block, count),
                local,
                remote,
            )
        )
        for i, j in zip(local, remote, strict=True):
            for k in range(block):
                expected[region.region_id, int(base + i * stride + k)] = (
                    theirs.region_id,
                    int(j * stride + k),
                )
    plan = here.prepare(Op.READ, peer, pairs)
    assert moves(plan.parts) == expected
    assert plan.nbytes == len(expected) == sum(p.total_bytes for p in plan.parts)
    assert plan.descriptors == sum(len(p) for p in plan.parts)
    assert plan.descriptors <= len(local) * tables


range_lists = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 12)), max_size=10
)


@settings(deadline=None)
@given(rows=range_lists)
def test_short_and_vector_path_agree(pair_of_agents, rows):
    here, peer = pair_of_agents
    region, theirs = here.regions[0], peer.region("one")
    local, remote, nbytes = ([row[i] for row in rows] for i in range(3))
    results = []
    for few in (4, -1):
        with patch("kvtransport.short_plan.FEW_PAIRS", few):
            try:
                plan = here.prepare(
                    Op.READ, peer, [Pair.ranges(region, local, theirs, remote, nbytes)]
                )
                results.append(moves(plan.parts))
            except DescriptorError as error:
                results.append(str(error))
    assert results[0] == results[1]
    covered = [b for lo, _, n in rows for b in range(lo, lo + n)]
    if len(set(covered)) == len(covered):
        assert results[0] == {
            (region.region_id, lo + i): (theirs.region_id, ro + i)
            for lo, ro, n in rows
            for i in range(n)
        }
    else:
        assert "same bytes" in results[0]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    max_descriptors=st.none() | st.integers(1, 5),
    max_bytes=st.none() | st.integers(4, 60),
    align=st.sampled_from([1, 4]),
)
def test_splitting_keeps_bytes_and_limits(sizes, max_descriptors, max_bytes, align):
    sizes = [size * align for size in sizes]
    start = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    n = len(sizes)
    blocks = Blocks(
        np.ones(n, np.int64),
        start,
        np.full(n, 2, np.int64),
        start[::-1].copy() * np.uint64(2) + np.uint64(64 * align),
        np.array(sizes, np.uint64),
    )
    limits = replace(
        CAPABILITIES,
        max_descriptors=max_descriptors,
        max_transfer_bytes=max_bytes,
        min_align=align,
    )
    parts = split_blocks(blocks, limits)
    assert moves(parts) == moves((blocks,))
    for part in parts:
        assert len(part) >= 1
        assert max_descriptors is None or len(part) <= max_descriptors
        assert max_bytes is None or part.total_bytes <= max_bytes
        assert all(getattr(part, f).flags.c_contiguous for f in Blocks.__slots__)
        assert not (part.local_offset % np.uint64(align)).any()


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_has_duplicates(values):
    assert as_vector(values, "x").has_duplicates() == (len(set(values)) != len(values))


def plan_of(agents, local, remote, tables=2):
    here, peer = agents
    pairs = [
        Pair.blocks(
            BlockTable(r, 0, 1, 1, SIZE), BlockTable(peer.region(r.name), 0, 1, 1, SIZE),
            local, remote,
        )
        for r in here.regions[:tables]
    ]  # fmt: skip
    return here.prepare(Op.READ, peer, pairs)


def test_contiguous_blocks_are_one_descriptor_per_region(pair_of_agents):
    index = np.arange(4096)
    assert plan_of(pair_of_agents, index, index).descriptors == 2
    assert plan_of(pair_of_agents, index[::-1], index[::-1]).descriptors == 2


def test_alternating_blocks_stay_apart(pair_of_agents):
    index = np.arange(0, 4096, 2)
    assert plan_of(pair_of_agents, index, np.arange(2048)).descriptors == 2 * 2048


def test_adjacent_on_one_side_only_is_not_merged(pair_of_agents):
    index = np.arange(100)
    assert plan_of(pair_of_agents, index, index[::-1]).descriptors == 200


def test_tables_with_gaps_never_merge(pair_of_agents):
    here, peer = pair_of_agents
    region, index = here.regions[0], np.arange(50)
    mine, theirs = BlockTable(region, 0, 16, 8, 50), BlockTable(peer.region("one"), 0, 8, 8, 50)
    assert here.prepare(Op.READ, peer, [Pair.blocks(mine, theirs, index, index)]).descriptors == 50


def test_tables_that_share_indices_are_merged_once(pair_of_agents):
    index = np.arange(1000)
    with patch("kvtransport.planner.index_runs", wraps=index_runs) as merged:
        plan_of(pair_of_agents, index, index)
    assert merged.call_count == 1
