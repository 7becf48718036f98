"""What fits in a given memory: blocks of the cache follow from it, and what does not fit is refused with numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid.core.units import parse_bytes
from hybrid.engine.room import BESIDE, LEAST_KEPT, NoRoom, room_for
from hybrid.planning.cache import CacheShape
from hybrid.planning.footprint import Footprint

CACHE = CacheShape(ctx=320, window=33, chunk=64, slots=4)  # 10 blocks, rings of 4
HELD = Footprint(weights=1000, tables=10, kv_global=40 * 100, kv_local=16 * 50, state=5, io=5, scratch=80)
ONE = 10 * 100 + 4 * 50
FIXED = 1000 + 100 + BESIDE


def test_blocks_take_what_is_left() -> None:
    assert (CACHE.table, CACHE.ring, CACHE.global_blocks, CACHE.local_blocks) == (10, 4, 40, 16)
    for times, blocks in ((1.0, (10, 4)), (2.5, (25, 10)), (4.0, (40, 16)), (1000.0, (10 * LEAST_KEPT, 4 * LEAST_KEPT))):
        room = room_for(FIXED + int(times * ONE), HELD, CACHE)
        assert room.blocks == blocks and room.sequences == min(times, LEAST_KEPT)
        assert room.weights + room.rest + room.kv <= room.memory
    assert "2.5 sequences of 320 tokens" in room_for(FIXED + int(2.5 * ONE), HELD, CACHE).line()


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(NoRoom, match=r"one sequence of 320 tokens 1.17 KiB.*ctx=288 would fit, or give it more"):
        room_for(FIXED + ONE - 1, HELD, CACHE)
    with pytest.raises(NoRoom, match="use a smaller weight type"):
        room_for(1000, HELD, CACHE)


def test_a_model_loads_into_its_memory(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, tiny(), dtype="f32")
    with pytest.raises(NoRoom) as refused:
        hybrid.load(folder, "cpu", ctx=128, memory="1MiB")
    found = re.search(r"together ([\d.]+ \w+)", str(refused.value))
    assert found is not None
    enough = parse_bytes(found[1]) + (1 << 20)
    with hybrid.load(folder, "cpu", ctx=128, slots=4, memory=enough) as model:
        room, cache = model.engine.room, model.engine.cache
        assert room is not None and (cache.global_blocks, cache.local_blocks) == room.blocks
        assert cache.table <= cache.global_blocks and room.sequences < 2 * LEAST_KEPT
        prompts = [[2, *range(20 + i, 60 + i)] for i in range(5)]
        texts = model.generate_batch(prompts, max_tokens=40, ignore_eos=True)
        assert texts == ["".join(model.generate(p, 40, ignore_eos=True)) for p in prompts]
    with pytest.raises(ValueError, match="no size"):
        hybrid.load(folder, "cpu", memory="much")
