"""Engine passes on the cpu device: rows, buckets, submits, and final state."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.audit import audit
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, greedy, together
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import DeviceLost
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request
from hybrid.engine.scheduler import Pass
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.planning.passes import (
    HIDDEN_BYTES,
    LOGITS_BYTES,
    bucket_of,
    buckets,
    capabilities_of,
    chunk_of,
    decode_buckets_of,
    fixed_rows,
    pass_sizes,
)

IDS = [2, *range(20, 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(open_checkpoint(folder), CpuDevice(), EngineConfig(ctx=64))


def test_prompts_are_cut_into_passes(folder: Path) -> None:
    """Prompts' rows are concatenated; a pass has an output row for each prompt that ends in it."""
    engine = Engine(open_checkpoint(folder), CpuDevice(), EngineConfig(ctx=64, chunk=16, slots=2))
    made: list[Pass] = []
    start = engine.runner.start
    engine.runner.start = lambda p: (made.append(p), start(p))[1]  # type: ignore[method-assign]
    wanted = [Request(0, ids, Options(max_tokens=1), start=at) for ids, at in ((IDS[:30], 5), (IDS[:3], 0))]
    handles = [engine.drive(request) for request in wanted]
    assert all(len(handle.result().ids) == 1 for handle in handles)
    arrays = [p.arrays() for p in made]
    for request in wanted:
        at = [
            (t, n)
            for tokens, positions, slots, _ in arrays
            for t, n, s in zip(tokens, positions, slots, strict=True)
            if s == slot_of(made, request)
        ]
        assert at == [(request.ids[n], n) for n in range(request.start, request.n_prompt)]
    assert all(len(tokens) <= 16 for tokens, *_ in arrays) and len(made) == 2
    assert sum(len(outs) for *_, outs in arrays) == 2 and all(a.dtype == np.int32 for four in arrays for a in four)


def slot_of(made: list[Pass], request: Request) -> int:
    return next(run.slot for p in made for run in p.runs if run.seq is request)


def test_buckets_hold_what_they_must() -> None:
    assert (
        buckets(512) == (1, 8, 32, 128, 512) and buckets(8) == (1, 8) and buckets(9) == (1, 8, 9) and buckets(1) == (1,)
    )
    assert [bucket_of(n, (1, 8, 32)) for n in (1, 2, 8, 9, 32)] == [1, 8, 8, 32, 32]
    with pytest.raises(ValueError, match="33 rows do not fit in the largest bucket, 32"):
        bucket_of(33, (1, 8, 32))


def test_passes_that_read_logits_back_fit_in_host_memory() -> None:
    hp = tiny(vocab=1 << 20, hidden=1 << 15)
    sizes = pass_sizes(hp, ctx=256, slots=2, chunk=128)
    assert sizes.rows == (1, 8, 32, 128) and sizes.outs == sizes.decode == (1, 2)
    for can, decode in ((["f16_matrices"], (1, 2, 4, 8, 16, 20)), ([], (1, 8, 20))):
        sizes = pass_sizes(hp, ctx=256, slots=20, chunk=128, decode=decode_buckets_of(can))
        assert sizes.outs == (1, 8, 20) and sizes.decode == decode
    assert sizes.logits == 8 and sizes.logits * 4 * hp.vocab <= LOGITS_BYTES < 32 * 4 * hp.vocab
    assert sizes.hidden == 128 and sizes.hidden * 4 * hp.hidden * (hp.n_layers + 1) <= HIDDEN_BYTES
    assert pass_sizes(tiny(vocab=1 << 30), 256, 1, 128).logits == 1  # one row, whatever its size
    assert pass_sizes(hp, ctx=20, slots=2, chunk=512).rows == (1, 8, 32, 40)  # no more rows than positions
    assert pass_sizes(hp, ctx=1, slots=4, chunk=2).rows == (1, 4)  # a row for each slot
    assert pass_sizes(hp, 256, 2, 128, fixed=8) == pass_sizes(hp, 256, 1, 512, fixed=8)
    assert [fixed_rows("vulkan", n) for n in (1, 8, 9)] == [8, 8, 9] and fixed_rows("cpu", 1) == 1


def test_passes_have_more_rows_with_matrix_units() -> None:
    assert chunk_of({"f16_matrices"}) == 2048 and chunk_of(()) == 512
    assert (
        capabilities_of(lambda name: name == "f16_matrices") == {"f16_matrices"}
        and capabilities_of(lambda name: False) == set()
    )


def test_no_more_passes_are_run_than_tokens_need(engine: Engine) -> None:
    """The last token is sampled and never run."""
    for most, ran in ((1, 10), (5, 14), (100, 63)):
        before = engine.scheduler.counts.rows
        request = Request(0, IDS[:10], Options(max_tokens=most, ignore_eos=True))
        request.private = True  # the cache holds it from the second time on
        assert len(engine.drive(request).result().ids) == min(most, 54)
        assert engine.scheduler.counts.rows - before == ran


def test_decode_passes_are_counted_since_the_last_prompt(engine: Engine) -> None:
    """Also those that begin a block, whose table entry is a message, and those of several sequences."""
    (text,) = together(engine, [IDS[:10]], 54)
    assert len(text) == 54 and engine.runner.decoded == 53
    together(engine, [IDS[:10], IDS[3:9]], 4)
    assert engine.runner.decoded == 3


def test_work_is_that_of_passes_that_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that the device loses is none, nor does it count with the next one."""
    greedy(engine, IDS[:10], 3)
    before, submit = engine.runner.work.totals(), engine.runner._submit

    def lost(*args: Any) -> int:
        raise DeviceLost("cpu: gone")

    monkeypatch.setattr(engine.runner, "_submit", lost)
    with pytest.raises(DeviceLost):
        greedy(engine, IDS[:10], 3)
    monkeypatch.setattr(engine.runner, "_submit", submit)
    assert engine.runner.work.totals() == before
    greedy(engine, IDS[:10], 3)
    for phase, total in engine.runner.work.totals().items():
        one = before[phase]
        assert (total.passes, total.rows) == (2 * one.passes, 2 * one.rows)
        assert (total.nbytes, total.flops) == pytest.approx((2 * one.nbytes, 2 * one.flops))


def test_a_close_waits_for_the_step_that_runs(engine: Engine) -> None:
    """Another thread closes it while a step holds the lock: no request ends within the step."""
    request = ask(engine, IDS[:10], 3).request
    closing = threading.Thread(target=engine.close, args=(ValueError("closed"),))
    with engine.lock:
        closing.start()
        while not engine.lock._queue:
            assert closing.is_alive(), "it has not waited"
            time.sleep(0.001)
        assert request.finish is None
    closing.join(60)
    assert request.finish == "error" and engine.scheduler.idle


def test_nothing_is_written_while_a_pass_may_read_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are written for a slot only if no pass in flight samples in it; each message has its own buffer."""
    engine = Engine(open_checkpoint(folder), CpuDevice(), EngineConfig(ctx=64, chunk=8, slots=2))
    seen: list[str] = []

    def noted(owner: object, name: str) -> None:
        run = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append("message" if args[:1] == ("inbox",) else name)
            return run(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((engine.device, "write"), (engine.runner, "_submit"), (engine.runner, "tokens")):
        noted(owner, name)
    assert [len(text) for text in together(engine, [IDS[:20], IDS[9:18], IDS[:5]], 4)] == [4, 4, 4]
    flying = 0
    for event in seen:
        flying += (event == "_submit") - (event == "tokens")
        assert not (flying and event == "write"), seen
    assert seen.count("write") > 4 and seen.count("_submit") > seen.count("message") > 3


def test_reading_logits_gives_its_slots_back(engine: Engine) -> None:
    for _ in range(2):
        assert engine.logits(IDS).shape == (len(IDS), 320)
        assert engine.hidden_states(IDS[:5]).shape == (4, 5, 64)
        assert engine.scheduler.idle
    parts = engine.logits_of([IDS], 8)
    next(parts)
    parts.close()  # dropped in the middle
    audit(engine.scheduler)
    assert engine.scheduler.idle


def test_rows_that_run_again_are_delivered_once(engine: Engine) -> None:
    """A request restarts, as after an aborted step."""
    wanted = engine.logits(IDS, 8)
    parts = engine.logits_of([IDS], 8)
    found = [next(parts)]
    engine._flights.clear()
    engine.runner.work.lost()
    engine.scheduler.lose(cache=False)
    assert np.array_equal(np.concatenate([*found, *parts]), wanted)


def test_held_back_text_comes_at_the_end(folder: Path) -> None:
    """A partial stop string at the last token becomes text."""
    with hybrid.load(folder, "cpu", ctx=64) as model:
        text = "".join(model.generate([2, 30, 31], 12, ignore_eos=True))
        assert len(text) > 3
        for stop in (text[-1] + "\0", text[-3:] + "\0", "\ufffd\0"):
            assert "".join(model.generate([2, 30, 31], 12, ignore_eos=True, stop=stop)) == text
            assert model.stats is not None and model.stats.finish == "length"
