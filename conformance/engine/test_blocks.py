"""Blocks of the KV cache without a scheduler: prefix hits, eviction order, accounting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.support.fake_runner import request
from hybrid.engine.blocks import Blocks, Group, groups_of
from hybrid.engine.scheduler import Limits, Scheduler
from hybrid.planning.cache import CacheShape


def store(blocks: int = 20, window: int = 0, local: int = 20, block: int = 4, salt: bytes = b"") -> Blocks:
    groups = [Group("global", blocks)]
    if window:
        groups.append(Group("local", local, window))
    return Blocks(groups, block, salt)


def computed(blocks: Blocks, ids: list[int], now: int = 1):
    """A sequence whose tokens have all been run, one after another."""
    held, writes = blocks.held(), []
    for position in range(len(ids)):
        blocks.slide(held, position)
        assert blocks.grow(held, position // blocks.block + 1, 0, writes)
        blocks.seal(held, ids, position + 1, now)
    return held


def found(blocks: Blocks, ids: list[int], now: int = 2) -> int:
    """Cached blocks that another sequence can reuse."""
    return blocks.match(blocks.held(), ids, len(ids) // blocks.block, now)[0]


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(0, 20), st.integers(1, 8))
def test_a_group_knows_which_blocks_a_row_sees(position, window, block):
    group = Group("g", 1, window)
    seen = range(max(0, position - window + 1) if window else 0, position + 1)
    assert group.first(position, block) == min(seen) // block
    spans = [len({p // block for p in range(max(0, q - window + 1) if window else 0, q + 1)}) for q in range(position)]
    assert group.need(position, block) >= max(spans)
    if position > 4 * (window + block):  # exactly the blocks it needs
        assert group.need(position, block) == max(spans)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 8))
def test_blocks_in_a_rows_window_are_held_and_hardly_more(positions, window, block):
    blocks = Blocks([Group("local", 30, window)], block)
    held, writes = blocks.held(), []
    for position in range(positions):
        blocks.slide(held, position)
        assert blocks.grow(held, position // block + 1, 0, writes)
        assert all(held.tables[0][p // block] >= 0 for p in range(max(0, position - window + 1), position + 1))
        assert blocks.used["local"] <= (window + block - 2) // block + 1
    blocks.check([held])


def test_a_prefix_is_found_as_far_as_it_is_the_same():
    blocks, ids = store(), list(range(14))
    held = computed(blocks, ids)
    assert found(blocks, ids) == 3  # the fourth block is not full
    assert found(blocks, [*ids[:9], 99, *ids[10:]]) == 2
    assert found(blocks, [99, *ids[1:]]) == 0
    assert found(blocks, ids[4:]) == 0, "the same tokens after another prefix have other keys"
    blocks.release(held)
    assert found(blocks, ids) == 3
    assert blocks.used == {"global": 0} and blocks.free == {"global": 20} and blocks.cached == {"global": 3}


def test_a_key_depends_on_the_model():
    """One cache, two salts: as if another model read a saved file of keys."""
    one, other = store(salt=b"a"), store(salt=b"b")
    ids = list(range(8))
    computed(one, ids)
    assert one.key(one.held(), ids, 1) != other.key(other.held(), ids, 1)


def test_tokens_of_any_size_have_keys_of_their_own():
    blocks = store(block=2)
    keys = {
        blocks.key(blocks.held(), ids, 0) for ids in ([1, 2], [2, 1], [258, 0], [0, 258], [262143, 2], [131071, 65535])
    }
    assert len(keys) == 6


def test_a_key_covers_a_whole_span():
    """Rows of a span see later rows in it; ids of embedding rows hash by the rows' content."""
    blocks, ids = store(block=4), list(range(12))
    key = blocks.key(blocks.held(), ids, 0)
    spans = [(2, 7)]
    within = blocks.key(blocks.held(spans=spans), ids, 0)
    assert (
        len(
            {
                key,
                within,
                blocks.key(blocks.held(spans=[(1, 7)]), ids, 0),
                blocks.key(blocks.held(spans=[(2, 6)]), ids, 0),
            }
        )
        == 4
    )
    assert blocks.key(blocks.held(spans=spans), [*ids[:6], 99, *ids[7:]], 0) != within, "the last of the span"
    assert blocks.key(blocks.held(spans=spans), [*ids[:7], 99, *ids[8:]], 0) == within
    assert blocks.key(blocks.held(spans=[(4, 8)]), ids, 0) == key, "none that begins there"
    assert blocks.key(blocks.held({3: 70}), ids, 0) == blocks.key(blocks.held({9: 70}), [0, 1, 2, 9], 0) != key
    assert blocks.key(blocks.held({11: 5}), ids, 0) == key


def test_a_window_must_be_there_whole():
    """Window 6, blocks of 4: a row at 16 sees positions from 11 on, so blocks 2 and 3."""
    blocks, ids = store(window=6), list(range(40))
    held = computed(blocks, ids)
    assert held.first == [0, 8] and blocks.used == {"global": 10, "local": 2}
    local = blocks.pools[1]
    assert found(blocks, ids[:16]) == 4
    local.forget(blocks.key(held, ids, 2))
    assert found(blocks, ids[:16]) == 2, "without block 2, a row at 16 cannot run, nor one at 12"
    assert found(blocks, ids) == 10, "the end needs none of that"
    blocks.check([held])


def test_cached_blocks_are_held_and_their_window_slides():
    blocks, ids = store(window=6), list(range(20))
    first = computed(blocks, ids)
    second, writes = blocks.held(), []
    n, coming = blocks.match(second, ids, 5, 2)
    assert (n, coming) == (5, False)
    blocks.adopt(second, n, 3, writes)
    assert [w[:3] for w in writes] == [*((0, 3, i) for i in range(5)), (1, 3, 3), (1, 3, 4)]
    assert blocks.used == {"global": 5, "local": 2}, "both sequences hold the same"
    blocks.check([first, second])
    blocks.release(first)
    blocks.check([second])
    blocks.slide(second, 24)
    assert second.first == [0, 4] and blocks.used == {"global": 5, "local": 1}
    blocks.release(second)
    blocks.check([])


def test_blocks_of_the_same_pass_are_pending():
    blocks, ids = store(), list(range(12))
    computed(blocks, ids, now=7)
    assert blocks.match(blocks.held(), ids, 3, 7) == (0, True)
    assert blocks.match(blocks.held(), ids, 3, 8) == (3, False)


def test_the_least_recently_used_branch_goes_first_from_its_end():
    blocks = store(blocks=6)
    a, b = [1] * 12, [2] * 12
    for ids in (a, b):
        blocks.release(computed(blocks, ids))
    again = blocks.held()
    blocks.adopt(again, blocks.match(again, a, 3, 2)[0], 0, [])
    blocks.release(again)  # a has been used since
    last = blocks.held()
    assert blocks.grow(last, 1, 0, []) and (found(blocks, a), found(blocks, b)) == (3, 2)
    assert blocks.grow(last, 4, 0, []) and (found(blocks, a), found(blocks, b)) == (2, 0)
    assert blocks.evictions == 4
    blocks.check([last])


def test_of_two_branches_the_one_released_first_goes_first():
    """Not the one computed first."""
    blocks = store(blocks=6)
    old, new = computed(blocks, [1] * 12, now=1), computed(blocks, [2] * 12, now=2)
    blocks.release(new)
    blocks.release(old)
    last = blocks.held()
    assert blocks.grow(last, 3, 0, []) and (found(blocks, [1] * 12, 3), found(blocks, [2] * 12, 3)) == (3, 0)


def test_what_a_window_has_passed_goes_from_its_beginning():
    """Four blocks out of sight at once, as after a long chunk of a prompt."""
    blocks, ids = store(window=4, local=5), [1] * 20
    held = blocks.held()
    assert blocks.grow(held, 5, 0, [])
    blocks.seal(held, ids, 20, 1)
    blocks.slide(held, 20)
    keys, other = [blocks.key(held, ids, i) for i in range(5)], blocks.held()
    for n in range(1, 5):
        assert blocks.grow(other, n, 0, [])
        assert [key in blocks.pools[1].by_key for key in keys] == [i >= n for i in range(5)]


def test_the_middle_of_a_branch_goes_before_its_last_window():
    """Two sequences of 20 positions (window 6) leave 5 of 10 local blocks each. The next sequence evicts the middle
    blocks."""
    blocks = store(blocks=40, window=6, local=10)
    a, b = [1] * 20, [2] * 20
    for ids in (a, b):
        blocks.release(computed(blocks, ids))
    assert blocks.cached["local"] == 10
    other = blocks.held()
    assert blocks.grow(other, 6, 0, [])
    assert (found(blocks, a), found(blocks, b)) == (5, 5), "both can be continued"
    assert found(blocks, a[:16]) == found(blocks, b[:16]) == 0
    assert blocks.grow(other, 7, 0, [])
    assert (found(blocks, a), found(blocks, b)) == (0, 5), "only then the older branch"
    blocks.check([other])


def test_the_window_at_a_fork_is_kept_like_the_ends():
    """Two continuations of the same 12 tokens: the window at the fork (blocks 1 and 2) outlives later blocks of either."""
    blocks = store(blocks=40, window=6, local=11)
    system = [7] * 12
    first = computed(blocks, [*system, *[1] * 16])
    second, ids, writes = blocks.held(), [*system, *[2] * 16], []
    blocks.adopt(second, blocks.match(second, ids, 3, 2)[0], 0, writes)
    blocks.anchor(second, 3)
    for position in range(12, 28):
        blocks.slide(second, position)
        blocks.grow(second, position // 4 + 1, 0, writes)
        blocks.seal(second, ids, position + 1, 1)
    blocks.release(first)
    blocks.release(second)
    other = blocks.held()
    blocks.grow(other, 5, 0, [])  # block 0, and both middles of 2
    assert (found(blocks, [*system, 3]), found(blocks, ids)) == (3, 7)
    blocks.grow(other, 6, 0, [])
    assert found(blocks, [*system, 3]) == 0
    blocks.check([other])


def test_duplicate_blocks_are_merged():
    blocks, ids = store(window=6), [1] * 20
    one, two = computed(blocks, ids), computed(blocks, ids)
    blocks.check([one, two])
    assert blocks.cached == {"global": 5, "local": 5}
    blocks.release(two)
    assert blocks.used == {"global": 5, "local": 2} and found(blocks, ids) == 5
    blocks.release(one)
    blocks.check([])
    assert blocks.free == {"global": 20, "local": 20} and found(blocks, ids) == 5


def test_a_prompts_end_is_kept_longer_than_its_middle():
    blocks = store(blocks=40, window=6, local=8)
    ids = [1] * 28
    held, writes = blocks.held(), []
    for position in range(28):
        blocks.slide(held, position)
        blocks.grow(held, position // 4 + 1, 0, writes)
        blocks.seal(held, ids, position + 1, 1)
        if position == 15:
            blocks.anchor(held, 4)
    other = blocks.held()
    blocks.grow(other, 3, 0, [])
    assert found(blocks, ids[:16]) == 4 and found(blocks, ids[:12]) == 0


def asked(blocks: Blocks, ids: list[int], generated: int, now: int) -> int:
    """Run a prompt whose rows are one pass, then rows of generated tokens, as the scheduler does; returns the number of
    cached tokens."""
    scheduler = Scheduler(blocks, Limits(slots=1, ctx=400, rows=400), lambda: 0.0)
    scheduler.number = now
    stream = request(0, ids, generated)
    scheduler.add(stream)
    while not scheduler.idle:
        done = scheduler.schedule()
        assert done is not None
        scheduler.commit(done, [900 + len(stream.ids)] * len(done.wanting))
    return stream.cached


@pytest.mark.parametrize("length", [17, 20, 150, 160, 161, 192])
def test_a_prompt_asked_again_is_found_on_a_used_cache(length: int) -> None:
    """All of it but the blocks of its last token, whatever else the cache holds, and however much was generated."""
    blocks = Blocks([Group("global", 100), Group("local", 24, 128)], 32)
    for n in range(20):  # ended conversations
        asked(blocks, [n] * 150, 120, 1000 * n)
    ids = [500 + i for i in range(length)]
    assert asked(blocks, ids, 70, 50_000) == 0
    for n in (1, 2):
        assert asked(blocks, ids, 70, 50_000 + 1000 * n) == (length - 1) // 32 * 32
    blocks.check([])


def test_without_its_global_block_a_local_one_is_free():
    blocks = store(blocks=5, window=6, local=20)
    blocks.release(computed(blocks, [1] * 20))
    assert blocks.cached == {"global": 5, "local": 5}
    other = blocks.held()
    assert blocks.grow(other, 2, 0, [])
    assert blocks.cached == {"global": 3, "local": 3}
    blocks.check([other])


def test_growing_is_atomic():
    blocks = store(blocks=9, window=6, local=4)
    held, writes = blocks.held(), []
    assert not blocks.grow(held, 5, 0, writes) and not writes and held.size == 0
    assert blocks.grow(held, 4, 0, writes) and blocks.available() == 0
    blocks.check([held])


def test_without_reuse_nothing_is_found():
    blocks = Blocks([Group("global", 9)], 4, reuse=False)
    computed(blocks, [1] * 20)
    assert found(blocks, [1] * 20) == 0


def test_a_lost_device_empties_the_cache():
    blocks, ids = store(window=6), [1] * 20
    blocks.release(computed(blocks, ids))
    blocks.clear()
    assert (
        found(blocks, ids) == 0
        and blocks.cached == {"global": 0, "local": 0}
        and blocks.free == {"global": 20, "local": 20}
    )
    blocks.check([])


def test_the_groups_of_a_cache():
    assert groups_of(CacheShape(100, 0, 16, 2)) == (Group("global", 8),)
    shape = CacheShape(100, 10, 16, 2)
    assert groups_of(shape) == (Group("global", shape.global_blocks), Group("local", shape.local_blocks, 10))


def test_a_ring_has_the_blocks_that_a_chunk_can_see():
    """Wherever in a block the chunk begins; no more."""
    for window, chunk in ((1, 1), (3, 32), (10, 16), (33, 1)):
        shape = CacheShape(1000, window, chunk, 1)
        seen = [range(at - window + 1, at + chunk) for at in range(500, 500 + shape.block)]
        assert shape.ring == max(len({position // shape.block for position in rows}) for rows in seen)


def test_impossible_values_are_errors():
    with pytest.raises(ValueError, match="group g: blocks must be positive, not 0"):
        Group("g", 0)
    with pytest.raises(ValueError, match="group g: window must be 0 or more, not -1"):
        Group("g", 1, -1)
    with pytest.raises(ValueError, match="needs a group of layers"):
        Blocks([], 4)


def test_the_audit_detects_corruption():
    """One reference too many, a block in two lists, a key without its block."""
    for wrong in ("reference", "free", "key"):
        blocks = store()
        held = computed(blocks, [1] * 9)
        pool = blocks.pools[0]
        if wrong == "reference":
            pool.refs[held.tables[0][0]] += 1
        elif wrong == "free":
            pool.free.append(held.tables[0][0])
        else:
            pool.keys[held.tables[0][0]] = None
        with pytest.raises(AssertionError):
            blocks.check([held])
