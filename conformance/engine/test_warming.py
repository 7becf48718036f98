"""What is made before the first request, so that none waits for it."""

from __future__ import annotations

from pathlib import Path

import hybrid
from conformance.support.devices import for_model
from conformance.support.synthetic import tiny, write_hf
from hybrid.engine.warming import programs

PATIENCE = 120.0


def test_after_warming_no_request_makes_anything_new(tmp_path: Path) -> None:
    """Prompts of all lengths arrive while others decode; plans, recordings, pipelines and memory are what they were."""
    with hybrid.load(write_hf(tmp_path, tiny(), dtype="f32"), for_model("vulkan"), ctx=96, slots=8, chunk=24, warm=True) as model:
        assert {(p, r, o) for p, r, o, *_ in model.engine.programs} >= set(programs(model.engine.sizes))
        before = model.engine.counters.copy()
        wanted = [[2, *range(30 + i, 31 + i * i)] for i in range(1, 9)]
        with model.engine.lock:  # they arrive together
            handles = [model.submit(ids, max_tokens=3 + i, ignore_eos=True) for i, ids in enumerate(wanted)]
        assert [len(h.result(PATIENCE).ids) for h in handles] == [3 + i for i in range(len(wanted))]
        with model.engine.lock:  # as many rows as sequences
            handles = [model.submit([2 + i], max_tokens=2, ignore_eos=True) for i in range(8)]
        assert [len(h.result(PATIENCE).ids) for h in handles] == [2] * 8
        made = model.engine.counters.minus(before)
        assert (made.pipelines, made.recordings, made.allocations, made.descriptor_writes) == (0, 0, 0, 0)
        assert made.submits == model.metrics().passes
