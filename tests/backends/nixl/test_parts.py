"""Cutting transfers into parts, and naming descriptors by table rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtransport.backend import Blocks
from kvtransport_backends.nixl.parts import common_unit, cut, rows
from kvtransport_backends.nixl.regions import Placed, RegionBook
from kvtransport_backends.nixl.tables import Table, expand

REGION = 1 << 20


def book(kinds: list[str]) -> RegionBook:
    made = RegionBook()
    for index, kind in enumerate(kinds):
        made.add(Placed(index, kind, index, 1 << 32 | index << 24, REGION))
    return made


@st.composite
def transfers(draw):
    """Descriptors over two or three regions per side, of one or two kinds."""
    sides = []
    count = draw(st.integers(1, 20))
    kinds = st.lists(st.sampled_from(["host", "cuda"]), min_size=1, max_size=3)
    unit = draw(st.sampled_from([1, 512, 4096, 3 * 4096]))
    for _ in range(2):
        regions = book(draw(kinds))
        ids = draw(st.lists(st.integers(0, len(regions) - 1), min_size=count, max_size=count))
        offsets = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
        sides.append((regions, np.array(ids), np.array(offsets, np.uint64) * np.uint64(unit)))
    sizes = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    (here, local, local_at), (there, remote, remote_at) = sides
    nbytes = np.array(sizes, np.uint64) * np.uint64(unit)
    return Blocks(local, local_at, remote, remote_at, nbytes), here, there


def bytes_named(blocks: Blocks) -> list[tuple[int, int, int, int]]:
    """Every byte's (local region, offset, remote region, offset), in runs of 256."""
    named = []
    columns = [vector.tolist() for vector in vars_of(blocks)]
    for local, local_at, remote, remote_at, size in zip(*columns, strict=True):
        named += [
            (local, local_at + step, remote, remote_at + step) for step in range(0, size, 256)
        ]
    return sorted(named)


def vars_of(blocks: Blocks):
    return (
        blocks.local_region,
        blocks.local_offset,
        blocks.remote_region,
        blocks.remote_offset,
        blocks.nbytes,
    )


@given(transfers(), st.sampled_from([4096, 64 * 1024, 1 << 30]))
def test_parts_name_the_same_bytes_with_one_kind_per_side(made, limit):
    blocks, here, there = made
    parts = cut(blocks, here, there, limit)
    total = sum(part.blocks.total_bytes for part in parts)
    assert total == blocks.total_bytes
    for part in parts:
        assert part.blocks.total_bytes <= limit or len(part.blocks) == 1
        assert len({placed.kind for placed in part.local}) == 1
        assert len({placed.kind for placed in part.remote}) == 1
        assert set(part.blocks.local_region.tolist()) <= {p.region_id for p in part.local}
        assert set(part.blocks.remote_region.tolist()) <= {p.region_id for p in part.remote}
    if limit % 256 == 0 and not (blocks.nbytes % np.uint64(256)).any():
        merged = [run for part in parts for run in bytes_named(part.blocks)]
        assert sorted(merged) == bytes_named(blocks)


@given(transfers())
def test_table_rows_name_the_same_bytes(made):
    blocks, here, _ = made
    unit = common_unit(blocks)
    if not unit:
        return
    found = here.distinct(blocks.local_region)
    first, start = {}, 0
    for placed in here:
        first[placed.region_id] = start
        start += placed.nbytes // unit
    table = Table(0, here.version, unit, first)
    counts = (blocks.nbytes // np.uint64(unit)).astype(np.int64)
    named = expand(table.rows(blocks.local_region, blocks.local_offset, found), counts)
    per_region = REGION // unit
    expected = [
        region * per_region + (offset + step) // unit
        for region, offset, size in zip(
            blocks.local_region.tolist(),
            blocks.local_offset.tolist(),
            blocks.nbytes.tolist(),
            strict=True,
        )
        for step in range(0, size, unit)
    ]
    assert named.tolist() == expected


@given(transfers())
def test_list_rows_are_addresses(made):
    blocks, here, _ = made
    found = here.distinct(blocks.local_region)
    table = rows(blocks.local_region, blocks.local_offset, blocks.nbytes, found)
    for row, region, offset, size in zip(
        table.tolist(),
        blocks.local_region.tolist(),
        blocks.local_offset.tolist(),
        blocks.nbytes.tolist(),
        strict=True,
    ):
        placed = here.get(region)
        assert row == [placed.address + offset, size, placed.device_id]
