"""Warming makes plans and pipelines before the first request, so that no request waits for them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.devices import for_model
from conformance.support.synthetic import tiny, write_hf
from hybrid.core.device import Counters, Program
from hybrid.engine.runner import VERIFY, Runner, warm_programs
from hybrid.engine.speculation import DraftModel
from hybrid.planning.passes import PassSizes, bucket_of, pass_sizes
from hybrid.spec.schedule import Phase

PATIENCE = 120.0


def nothing_new(made: Counters) -> bool:
    return (made.pipelines, made.recordings, made.allocations, made.descriptor_writes) == (0, 0, 0, 0)


def test_after_warming_no_request_makes_anything_new(tmp_path: Path) -> None:
    """Prompts of all lengths arrive while other sequences decode; plans, recordings, pipelines and memory do not
    change."""
    with hybrid.load(
        write_hf(tmp_path, tiny(), dtype="f32"), for_model("vulkan"), ctx=96, slots=8, chunk=24, warm=True
    ) as model:
        assert {(p, r, o, options) for p, r, o, *_, options in model.engine.runner._programs} >= set(
            warm_programs(model.engine.sizes)
        )
        before = model.engine.counters.copy()
        wanted = [[2, *range(30 + i, 31 + i * i)] for i in range(1, 9)]
        with model.engine.lock:  # they arrive together
            handles = [model.submit(ids, max_tokens=3 + i, ignore_eos=True) for i, ids in enumerate(wanted)]
        assert [len(h.result(PATIENCE).ids) for h in handles] == [3 + i for i in range(len(wanted))]
        with model.engine.lock:  # as many rows as sequences
            handles = [model.submit([2 + i], max_tokens=2, ignore_eos=True) for i in range(8)]
        assert [len(h.result(PATIENCE).ids) for h in handles] == [2] * 8
        made = model.engine.counters.minus(before)
        assert nothing_new(made)
        assert made.submits == model.metrics().passes


def test_drafts_of_several_beside_prompts_make_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts arrive while drafts of several sequences are verified; the draft model's engine makes no plans either."""
    files = [write_hf(tmp_path / str(n), tiny(n_layers=n), dtype="f32") for n in (3, 1)]
    with hybrid.load(
        files[0], for_model("vulkan"), ctx=96, slots=4, chunk=16, draft=files[1], speculate=2, warm=True
    ) as model:
        drafter = None if model.speculator is None else model.speculator.drafter
        assert isinstance(drafter, DraftModel)
        engines, asked, program = [model.engine, drafter.runner], list[tuple[int, int]](), model.engine.runner.program

        def noted(phase: Phase, rows: int, outs: int, **more: Any) -> Program:
            asked.append((rows, outs) if "verify" in more.get("options", ()) else (0, 0))
            return program(phase, rows, outs, **more)

        monkeypatch.setattr(model.engine.runner, "program", noted)
        before = [engine.device.counters.copy() for engine in engines]
        with model.engine.lock:  # as many as there are slots, then one after each that ends
            handles = [
                model.submit([2, *range(30, 30 + n)], max_tokens=24 - n, ignore_eos=True) for n in (1, 2, 9, 20, 5, 14)
            ]
        found = [h.result(PATIENCE) for h in handles]
        assert [len(one.ids) for one in found] == [23, 22, 15, 4, 19, 10] and not model.engine.faults
        assert all(one.usage.drafted_tokens for one in found)
        assert any(rows > outs > 3 for rows, outs in asked), "no pass had both"
        assert all(nothing_new(e.device.counters.minus(was)) for e, was in zip(engines, before, strict=True))


def test_the_garbage_of_loading_is_collected_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection scans every plan: one that is due runs at the end of loading."""
    happened: list[str] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            happened.append("collected")

    program = Runner.program
    monkeypatch.setattr(Runner, "program", lambda *args, **more: (happened.append("made"), program(*args, **more))[1])
    gc.callbacks.append(collected)
    try:
        with hybrid.load(write_hf(tmp_path, tiny(), dtype="f32"), for_model("vulkan"), ctx=96, slots=8, warm=True):
            assert "made" in happened and happened[-1] == "collected"
    finally:
        gc.callbacks.remove(collected)


@pytest.mark.parametrize("slots", [1, 3, 5, 8, 33])
@pytest.mark.parametrize("drafts", [0, 2, 16])
def test_every_pass_has_its_plan(slots: int, drafts: int) -> None:
    """For any number of rows of prompts, decoding sequences and their drafts in a pass."""
    for fixed in (None, max(8, slots)):
        sizes = pass_sizes(tiny(), 96, slots, 64, fixed, drafts)
        made = set(warm_programs(sizes))
        for rows in range(1, sizes.rows[-1] + 1):
            for outs in range(rows + 1):
                assert made >= needed(sizes, rows, outs, slots)


def needed(sizes: PassSizes, rows: int, outs: int, slots: int) -> set[tuple]:
    """Plans, as Runner.start finds them, of a pass that samples so many tokens: of as many sequences, or of fewer with
    drafts."""
    found, bucket = set[tuple](), bucket_of(rows, sizes.rows)
    if outs <= slots and (outs < rows or sizes.rows == sizes.outs):  # otherwise a decode pass runs them
        found.add(("prefill", bucket, bucket_of(outs, sizes.outs) if outs else 0, frozenset()))
    if sizes.drafts and 1 < outs <= sizes.wanted:
        found.add(("prefill", bucket, bucket_of(outs, sizes.wants), VERIFY))
    return found
