"""Threads that share a model: each gets the text of a single thread, or an error."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model
from conformance.support.synthetic import tiny, write_hf
from hybrid.engine.lock import EngineLock
from hybrid.engine.runner import Flight
from hybrid.engine.scheduler import Pass
from hybrid.model import Model

PROMPTS = ([2, 4, 5, 6], [2, 7, 8, 9, 10, 11, 12, 13, 14], [2] * 17)
PATIENCE = 60.0  # test timeouts in seconds; no test takes one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


def load(folder, device: str, slots: int) -> Model:
    return hybrid.load(folder, for_model(device), ctx=96, slots=slots)


def text(model: Model, prompt: list[int], **options: Any) -> str:
    return "".join(model.generate(prompt, 24, ignore_eos=True, **options))


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """What each job returns, or the error that it raises, each in a separate thread, started at the same moment."""
    start, found = threading.Barrier(len(jobs)), [None] * len(jobs)

    def run(i: int) -> None:
        start.wait(PATIENCE)
        try:
            found[i] = jobs[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread never ends"
    return found


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.slow
def test_threads_get_the_text_that_each_would_get_alone(folder, device):
    with load(folder, device, 4) as model:

        def conversation() -> list[str]:
            return [text(model, p) for p in (PROMPTS[0], PROMPTS[0] + [20, 21], PROMPTS[2])]

        jobs: list[Callable[[], Any]] = [lambda p=p: text(model, p, temperature=0.8, seed=3) for p in PROMPTS]  # type: ignore[misc]
        jobs += [conversation, lambda: model.logits(PROMPTS[1]).tobytes()]
        alone = [job() for job in jobs]
        for _ in range(3):
            shared = together(*jobs[:3], lambda: text(model, PROMPTS[1], temperature=0.8, seed=3))
            assert shared == [*alone[:3], alone[1]]
        assert together(*jobs[1:]) == alone[1:]
        assert model.engine.scheduler.idle and set(model.engine.scheduler.blocks.used.values()) == {0}
        assert sorted(model.engine.scheduler._slots) == list(range(4)), "a slot was kept"


@pytest.mark.slow
@pytest.mark.parametrize("device", BACKENDS)
def test_iterators_of_one_thread_interleave(folder, device):
    with load(folder, device, 3) as model:
        alone = [text(model, p) for p in PROMPTS]
        running = [model.generate(p, 24, ignore_eos=True) for p in PROMPTS]
        found = ["", "", ""]
        while any(pieces := [next(r, "") for r in running]):
            found = [f + p for f, p in zip(found, pieces, strict=True)]
        assert found == alone


def test_a_dropped_iterator_of_another_thread_blocks_no_request(folder):
    with load(folder, "cpu", 2) as model:
        alone, kept = text(model, PROMPTS[1]), []

        def begin() -> None:
            kept.append(model.generate(PROMPTS[0], 24, ignore_eos=True))
            next(kept[0])

        assert together(begin) == [None]  # that thread has ended, its iterator has not
        assert together(lambda: text(model, PROMPTS[1])) == [alone]
        held = model.generate(PROMPTS[0], 24)
        next(held)
        assert together(lambda: text(model, PROMPTS[1])) == [alone]  # no slot is free while others run
        kept.clear()
        held.close()
        assert not model.engine._requests and set(model.engine.scheduler.blocks.used.values()) == {0}


def test_a_generation_and_a_reader_of_logits_share_one_slot(folder):
    with load(folder, "cpu", 1) as model:
        wanted, logits = text(model, PROMPTS[1]), model.engine.logits(PROMPTS[2], 4)
        pieces = model.generate(PROMPTS[1], 24, ignore_eos=True)
        found = [next(pieces)]
        assert np.array_equal(model.engine.logits(PROMPTS[2], 4), logits)  # the generation's passes run before
        assert "".join([*found, *pieces]) == wanted and model.metrics().preemptions == 0
        parts = model.engine.logits_of([PROMPTS[2]], 4)
        first = next(parts)
        assert text(model, PROMPTS[1]) == wanted and model.metrics().preemptions == 1  # passes of abandoned text
        assert np.array_equal(np.concatenate([first, *parts]), logits)


def test_an_iterator_that_garbage_collection_closes_in_the_midst_of_a_pass_waits_for_its_end(folder):
    with load(folder, "cpu", 2) as model:
        alone, seen = text(model, PROMPTS[1]), []
        cycle: list[Any] = [model.generate(PROMPTS[0], 24, ignore_eos=True)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        start = model.engine.runner.start

        def collecting(p: Pass) -> Flight:
            if not seen:
                gc.collect()
                seen.append(len(model.engine._requests))
            return start(p)

        model.engine.runner.start = collecting  # type: ignore[method-assign]
        assert text(model, PROMPTS[1]) == alone
        assert seen == [2] and not model.engine._requests  # still there during the pass, then ended


@pytest.mark.parametrize("device", BACKENDS)
def test_closing_a_model_during_a_generation_is_an_error(folder, device):
    model = load(folder, device, 2)
    began = threading.Event()

    def generate() -> None:
        for _ in model.generate(PROMPTS[0], 90, ignore_eos=True):
            began.set()
            time.sleep(0.001)

    def close() -> None:
        began.wait(PATIENCE)
        model.close()

    error, closed = together(generate, close)
    assert isinstance(error, ValueError) and "this model is closed" in str(error) and closed is None
    with pytest.raises(ValueError, match="this model is closed"):
        model.logits(PROMPTS[0])


# ---------------------------------------------------------------------------------------------------------- the lock
def test_the_lock_is_given_in_the_order_in_which_it_was_asked_for():
    lock, order, threads = EngineLock(), list[int](), list[threading.Thread]()

    def take(i: int) -> None:
        with lock, lock:  # a thread that holds it may take it again
            order.append(i)

    with lock:
        for i in range(5):
            threads.append(threading.Thread(target=take, args=(i,), daemon=True))
            threads[-1].start()
            deadline = time.monotonic() + PATIENCE
            while len(lock._queue) <= i and time.monotonic() < deadline:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [0, 1, 2, 3, 4]


def test_an_error_and_a_deferred_call_leave_the_lock_free():
    lock, done = EngineLock(), list[str]()

    def steps() -> Iterator[int]:
        try:
            yield 1
            raise KeyError("inside")
        finally:
            done.append("closed")

    with pytest.raises(KeyError, match="inside"):
        list(lock.steps(steps()))  # type: ignore[arg-type]
    with lock:
        lock.call_soon(lambda: done.append("later"))
        assert done == ["closed"]
    assert done == ["closed", "later"]
    lock.call_soon(lambda: done.append("now"))
    assert done[-1] == "now"
    with pytest.raises(ZeroDivisionError):
        lock.call_soon(lambda: 1 // 0)
    assert together(lambda: lock.__enter__() and lock.__exit__(None, None, None)) == [None]


def test_logits_hold_the_lock_for_a_pass_at_a_time(folder):
    with load(folder, "cpu", 2) as model:
        parts = model.engine.logits_of([PROMPTS[2]], 4)
        first = next(parts)
        assert together(lambda: text(model, PROMPTS[1])) == [text(model, PROMPTS[1])]
        assert np.array_equal(np.concatenate([first, *parts]), model.engine.logits(PROMPTS[2], 4))
