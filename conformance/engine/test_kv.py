"""Block tables: sequences never share blocks, rings hold every visible position, nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hybrid.engine.GONE import BlockTables
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.core.errors import ContextExceeded, NoFreeSlot
from hybrid.engine.blocks import Blocks, groups_of
from hybrid.planning.cache import CacheShape


def tables_of(shape: CacheShape) -> BlockTables:
    return BlockTables(shape, Blocks(groups_of(shape), shape.block))


@settings(max_examples=60)  # a call takes microseconds
@given(st.integers(1, 300), st.integers(0, 200), st.integers(1, 64), st.integers(1, 6), st.sampled_from([1, 4, 32]))
def test_ring_keeps_every_position_that_a_chunk_can_see(ctx, window, chunk, slots, block):
    shape = CacheShape(ctx, window, min(chunk, ctx), slots, block)
    tables = tables_of(shape)
    slot = tables.admit(ctx)
    row = tables.tables["local"][slot]
    for start in {0, ctx // 2, ctx - shape.chunk}:  # rows start..start+chunk are appended, then all of them attend
        seen = np.arange(max(0, start - max(window, 1) + 1), min(ctx, start + shape.chunk))
        if window:
            places = {(row[p // block], p % block) for p in seen.tolist()}
            assert len(places) == len(seen)
    assert row.max() < shape.local_blocks


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=40))
def test_sequences_never_share_blocks_and_all_come_back(events):
    shape = CacheShape(100, 10, 16, 4, 8)
    tables, lengths = tables_of(shape), {}
    for arrive, length in events:
        if arrive and len(lengths) < shape.slots:
            lengths[tables.admit(length)] = length
        elif lengths:
            slot = min(lengths)
            tables.release(slot)
            del lengths[slot]
        for group, blocks in (("global", shape.global_blocks), ("local", shape.local_blocks)):
            table = tables.tables[
                group
            ]  # no entry is missing: kernels may take a visible key without asking for its block
            assert ((table >= 0) & (table < blocks)).all()
            used = [set(tables.tables[group][s, : -(-n // 8)].tolist()) for s, n in lengths.items()]
            assert sum(map(len, used)) == len(set().union(*used))
        for s, n in lengths.items():  # a global layer has a block of its own for every stretch of the sequence
            assert len(set(tables.tables["global"][s, : -(-n // 8)].tolist())) == -(-n // 8)
    for slot in list(lengths):
        tables.release(slot)
    assert [tables.admit(100) for _ in range(4)] == [0, 1, 2, 3]


def test_what_does_not_fit_is_said():
    tables = tables_of(CacheShape(64, 0, 16, 2))
    with pytest.raises(ContextExceeded, match=r"65 tokens does not fit in the context of 64: .* larger ctx"):
        tables.admit(65)
    tables.admit(64)
    tables.admit(1)
    with pytest.raises(NoFreeSlot, match="all 2 slots are in use"):
        tables.admit(1)
    with pytest.raises(ValueError, match="holds no sequence"):
        tables_of(CacheShape(64, 0, 16, 2)).release(0)
    with pytest.raises(ValueError, match=r"slots must be 1\.\.256, not 257"):
        CacheShape(64, 0, 16, 257)
