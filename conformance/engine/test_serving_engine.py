"""Scheduled passes on a real engine: prompts and decoding in the same passes, blocks reused and preempted, faults.
Every text equals that of its sequence alone.

`python -m conformance.engine.test_serving_engine STEPS SEED [draft]` runs many steps of the state machine and prints
counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from threadpoolctl import threadpool_limits

import hybrid
from conformance.support.arrivals import LONG_PROMPT, TOTALS, Arrivals, ConsumerError, Faulty
from conformance.support.cooperative import give_up
from conformance.support.devices import BACKENDS, for_model, shared_device
from conformance.support.models import cut, golden, prompt
from conformance.support.paths import DEMO
from conformance.support.profile import LONG
from conformance.support.stepped import Stepped, alone, draft_of, same
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.errors import ContextExceeded
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.sampling import mask_words
from hybrid.kernels.oracle.device import CpuDevice

PATIENCE = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32"))


@pytest.fixture
def on(checkpoint: Checkpoint) -> Iterator[Callable[..., Stepped]]:
    opened: list[Any] = []

    def make(backend: str = "cpu", **options: Any) -> Stepped:
        device: Any = CpuDevice() if backend == "cpu" else shared_device(backend)
        opened.append(device)
        return Stepped(Engine(checkpoint, device, EngineConfig(**{"ctx": 128, "slots": 3, "chunk": 32, **options})))

    yield make
    for device in opened:
        device.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_cached_prefixes_are_not_computed_again(on: Callable[..., Stepped], backend: str) -> None:
    made = on(backend)
    first = made.submit(LONG_PROMPT, max_tokens=20)
    made.finish()
    text = list(first.result(0).ids)
    same(made.engine, LONG_PROMPT, text, alone(made.engine, LONG_PROMPT, 20))
    turn = [*LONG_PROMPT, *text, 7, 9, 11]
    asked = [(turn, 64), ([*LONG_PROMPT, 5], 64), ([*LONG_PROMPT[:40], 5, 6], 32), (LONG_PROMPT[::-1], 0)]
    handles = [made.submit(ids, max_tokens=6) for ids, _ in asked]
    made.finish()
    for (ids, cached), handle in zip(asked, handles, strict=True):
        one = handle.result(0)
        assert one.usage.cached_tokens == cached and one.usage.prompt_tokens == len(ids)
        same(made.engine, ids, list(one.ids), alone(made.engine, ids, 6))
    counted = made.engine.metrics()
    assert counted.cached_tokens == sum(c for _, c in asked) and counted.blocks["global"]["used"] == 0


@pytest.mark.slow
def test_sequences_are_preempted_where_blocks_are_few(on: Callable[..., Stepped]) -> None:
    """Blocks for one whole sequence: others are preempted, and continue from blocks that are still cached."""
    made = on(blocks=(5, 5), slots=3)
    asked = [[2, *range(20 + i, 50 + 2 * i)] for i in range(4)]
    handles = [made.submit(ids, max_tokens=60) for ids in asked]
    made.finish()
    for ids, handle in zip(asked, handles, strict=True):
        same(made.engine, ids, list(handle.result(0).ids), alone(made.engine, ids, 60))
    assert made.engine.metrics().preemptions > 0
    with pytest.raises(ContextExceeded, match="more memory"):
        on(blocks=(2, 5)).submit([2] * 40, max_tokens=60)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_others_run_between_two_passes(on: Callable[..., Stepped], backend: str) -> None:
    made = on(backend)
    wanted = alone(made.engine, LONG_PROMPT, 20)
    handle = made.submit(LONG_PROMPT, max_tokens=20)
    for between in (lambda: alone(made.engine, [2, 5, 6], 5), lambda: made.engine.logits([2, 9]), lambda: None) * 4:
        made.step(2)
        between()
    made.finish()
    same(made.engine, LONG_PROMPT, list(handle.result(0).ids), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_device_has_the_tables_that_the_scheduler_has(on: Callable[..., Stepped], backend: str) -> None:
    """Rows continue for many passes, and get new blocks meanwhile."""
    made = on(backend)
    handles = [made.submit(ids, max_tokens=50) for ids in ([2, 5, 6], LONG_PROMPT, [2, 9])]
    for _ in range(40):
        made.step()
        tables = {g: made.engine.device.read(f"block_table.{g}").array for g in ("global", "local")}
        for stream in made.engine.scheduler.running:
            held = stream.held
            assert held is not None
            for g, pool in enumerate(made.engine.runner.blocks.pools):
                there = tables[pool.group.name][stream.slot, held.first[g] : held.size].tolist()
                assert there == held.tables[g][held.first[g] :]
    made.finish()
    assert all(len(h.result(0).ids) == 50 for h in handles)


@pytest.mark.slow
def test_aborted_steps_cost_no_token(on: Callable[..., Stepped]) -> None:
    """Every sequence restarts from its known tokens."""
    made = on("vulkan")
    asked = [LONG_PROMPT, [2, 5, 6], [2, 7]]
    wanted = [alone(made.engine, ids, 24) for ids in asked]
    for before in (1, 5, 9):
        handles = [made.submit(ids, max_tokens=24) for ids in asked]
        made.step(before)
        give_up(made.engine)
        made.finish()
        for ids, handle, text in zip(asked, handles, wanted, strict=True):
            same(made.engine, ids, list(handle.result(0).ids), text)
        assert len(made.engine.faults) == 1 and not made.engine.runner.cooperative
        made.engine.runner.cooperative, made.engine.runner.faults[:] = True, []
        made.engine.runner._programs.clear()


def test_a_pass_that_was_never_submitted_leaves_no_message(
    on: Callable[..., Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = on()
    wanted = alone(made.engine, [2, 5, 6], 8)

    def broken(*args: Any) -> int:
        raise MemoryError("injected")

    for n in (1, 2, 3):
        handle = made.submit(LONG_PROMPT[n:], max_tokens=5)
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(made.engine.runner, "_submit", broken)
            made.step()
        made.engine._fail_all(MemoryError("injected"))
        assert handle.done
    last = made.submit([2, 5, 6], max_tokens=8)
    made.finish()
    same(made.engine, [2, 5, 6], list(last.result(0).ids), wanted)


def test_a_pass_that_was_never_submitted_may_have_no_request(
    on: Callable[..., Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only request's constraint raises while the pass is made, then the device fails: the next request still runs."""
    made = on()
    wanted = alone(made.engine, [2, 5, 6], 8)

    def broken(*args: Any) -> int:
        raise MemoryError("injected")

    refused = made.submit([2, 7], max_tokens=5, constraint=Faulty(mask_words(320), "mask", 0))
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as failed:
        patch.setattr(made.engine.runner, "_submit", broken)
        made.step()
    made.engine._fail_all(failed.value)
    with pytest.raises(ConsumerError):
        refused.result(0)
    last = made.submit([2, 5, 6], max_tokens=8)
    made.finish()
    same(made.engine, [2, 5, 6], list(last.result(0).ids), wanted)


@pytest.mark.slow
def test_after_warm_up_requests_that_come_and_go_make_nothing_new(on: Callable[..., Stepped]) -> None:
    made = on("vulkan")

    def run() -> None:
        handles = []
        for i in range(6):
            handles.append(
                made.submit([2, *range(30 + i, 40 + 4 * i)], max_tokens=4 + i, temperature=0.5 * (i % 2), seed=i)
            )
            made.step(2)
        made.finish()
        assert [len(h.result(0).ids) for h in handles] == [4 + i for i in range(6)]

    run()
    before, passes = made.engine.counters.copy(), made.engine.metrics().passes
    made.engine.scheduler.blocks.clear()  # otherwise prompts would be shorter, and passes different
    run()
    done = made.engine.counters.minus(before)
    assert (done.allocations, done.recordings, done.pipelines, done.descriptor_writes, done.transfers) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert done.submits == made.engine.metrics().passes - passes


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_32_prompts_at_once_get_the_texts_of_single_runs(backend: str) -> None:
    """The demonstration model (in the short profile its last three layers), real text of many lengths."""
    count, step = (24, 5) if LONG else (4, 1)
    few, more, grow = (4, 8, 4.0) if LONG else (2, 1, 0.25)  # tokens of the shortest prompts, and the growth of lengths
    file = DEMO if LONG else cut(open_checkpoint(DEMO), (9, 10, 11))
    with hybrid.load(file, for_model(backend), ctx=256, slots=32, chunk=128, precision="exact") as model:
        text = prompt(200)
        known = [list(case.ids) for case in golden()]
        asked = [
            known[i % len(known)][: few + step * i // 3] if i % 2 else [2, *text[i : i + more + int(grow * i)]]
            for i in range(32)
        ]
        handles = [model.submit(ids, max_tokens=count, ignore_eos=True) for ids in asked]
        found = [h.result(PATIENCE) for h in handles]
        assert model.metrics().passes < 32 * count / 2, "they did not run together"
        for i in range(32) if LONG else range(1, 32, 9):
            for _ in model.generate(asked[i], max_tokens=count, ignore_eos=True):
                pass
            assert model.stats is not None
            same(model.engine, asked[i], list(found[i].ids), list(model.stats.ids))
        assert model.engine.scheduler.idle


@pytest.mark.slow
@pytest.mark.blas
def test_the_engine_under_arrivals_and_faults(on: Callable[..., Stepped]) -> None:
    drive(on(blocks=(7, 7), slots=3, chunk=16), 200 if LONG else 6)


@pytest.mark.slow
def test_a_draft_beside_the_engine_under_arrivals_and_faults(on: Callable[..., Stepped]) -> None:
    """A model as its own draft, with some of its drafts changed."""
    made = on(blocks=(7, 7), slots=3, chunk=16, drafts=7)
    made.draft = draft_of(made.engine)
    drive(made, 100 if LONG else 8)
    assert TOTALS["drafted"] and TOTALS["drafts that failed"]


def drive(made: Stepped, examples: int, number: int | None = None) -> None:
    """Run so many machines on one engine; number: a seed, None for the test's own."""

    class Machine(Arrivals):
        pass

    Machine.made, Machine.wanted = Stepped(made.engine, queue=6, draft=made.draft), {}
    wanted = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=number is None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine if number is None else seed(number)(Machine), settings=wanted)
    seen = Machine.made.engine.metrics()
    counts = ("passes", "preemptions", "evictions", "prompt_tokens", "cached_tokens", "generated_tokens")
    TOTALS.update({name: getattr(seen, name) for name in counts})
    TOTALS.update({"drafted": seen.drafted, "accepted": seen.accepted})


@pytest.mark.slow
def test_deterministic_requests_have_the_same_bits_in_any_company(on: Callable[..., Stepped]) -> None:
    """Every token is compared, also past near ties, whatever runs beside it, also after a prefix hit."""
    made = on("vulkan", deterministic=True, slots=4, ctx=96)
    asked = [[2, *range(20, 24 + 9 * i)] for i in range(4)]
    single = []
    for ids in asked:
        made.engine.scheduler.blocks.clear()
        handle = made.submit(ids, max_tokens=12, temperature=0.9, seed=4)
        made.finish()
        single.append(handle.result(0).ids)
    for _ in range(2):  # prefix hits the second time
        handles = [made.submit(ids, max_tokens=12, temperature=0.9, seed=4) for ids in asked]
        made.finish()
        assert [h.result(0).ids for h in handles] == single


if __name__ == "__main__":
    steps, begin = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1, "blas"):
        read = open_checkpoint(write_hf(Path(folder), tiny(), dtype="f32"))
        engine = Engine(read, CpuDevice(), EngineConfig(ctx=128, slots=3, chunk=16, blocks=(7, 7), drafts=7))
        draft = draft_of(engine) if "draft" in sys.argv else None
        while TOTALS["steps"] < steps:
            drive(Stepped(engine, draft=draft), 100, begin + TOTALS["machines"])
            print(json.dumps(TOTALS), flush=True)
