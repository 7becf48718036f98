"""Requests run in the background: each gets the text of the request alone, whatever the others do."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.core.errors import ContextExceeded, DeviceLost, QueueFull
from hybrid.engine.request import Completion, Event
from hybrid.model import Model

PROMPTS = ([2, 4, 5, 6], [2, 7, 8, 9, 10, 11, 12, 13, 14], [2] * 17, [2, *range(20, 60)], [2, 9])
PATIENCE = 60.0  # test timeouts in seconds; no test takes one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


def load(folder: Path, device: str, slots: int, **options: Any) -> Model:
    return hybrid.load(folder, for_model(device), ctx=96, slots=slots, **options)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with load(folder, "cpu", 3) as made:
        yield made


def alone(model: Model, prompt: list[int], count: int = 24, **options: Any) -> str:
    return "".join(model.generate(prompt, max_tokens=count, ignore_eos=True, **options))


@pytest.mark.slow
@pytest.mark.parametrize("device", BACKENDS)
def test_requests_together_get_the_texts_that_they_get_alone(folder: Path, device: str) -> None:
    """More requests than slots, of several lengths, greedy and sampled, some sent by other threads."""
    with load(folder, device, 3) as model:
        wanted: list[tuple[list[int], int, dict[str, Any]]]
        wanted = [
            (p, n, {"temperature": t, "seed": 5}) for p in PROMPTS for n in (3, 24 if LONG else 12) for t in (0.0, 0.8)
        ]
        single = [alone(model, p, n, **o) for p, n, o in wanted]
        found: list[Any] = [None] * len(wanted)

        def ask(i: int) -> None:
            prompt, n, options = wanted[i]
            found[i] = model.submit(prompt, max_tokens=n, ignore_eos=True, **options).result(PATIENCE)

        threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(len(wanted))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert [one.text for one in found] == single
        for (prompt, n, _), one in zip(wanted, found, strict=True):
            assert one.finish == "length" and len(one.ids) == n
            assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(prompt), n)
            assert 0 <= one.timings.queued <= one.timings.first_token <= one.timings.total
        assert model.engine.scheduler.idle, "a slot was kept"
        counted = model.metrics()
        assert (counted.waiting, counted.running, counted.finished) == (0, 0, {"length": 2 * len(wanted)})
        assert counted.generated_tokens == 2 * sum(n for _, n, _ in wanted)


def test_pieces_events_and_result_agree(model: Model) -> None:
    handle = model.submit(PROMPTS[1], max_tokens=12, ignore_eos=True)
    pieces, events, whole = list(handle), list(handle.events()), handle.result(PATIENCE)
    assert handle.done and all(pieces) and isinstance(whole, Completion) and isinstance(events[0], Event)
    assert "".join(pieces) == "".join(e.text for e in events) == whole.text == alone(model, PROMPTS[1], 12)
    assert [i for e in events for i in e.ids] == list(whole.ids)
    assert model.stats is not None and model.stats.ids == whole.ids


def test_asyncio_reads_many_at_once(model: Model) -> None:
    async def read(prompt: list[int]) -> str:
        handle = model.submit(prompt, max_tokens=10, ignore_eos=True)
        text = "".join([piece async for piece in handle])
        assert (await handle.aresult()).text == text
        return text

    async def every() -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*map(read, PROMPTS)), PATIENCE)

    assert asyncio.run(every()) == [alone(model, p, 10) for p in PROMPTS]


class Anything:
    """A constraint that forbids no token; its requests' tokens are delivered one at a time."""

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        pass

    def copy(self) -> Anything:
        return self


@pytest.mark.parametrize("cancelled", [False, True])
def test_asyncio_is_notified_of_each_token(model: Model, cancelled: bool) -> None:
    async def read() -> str:
        handle = model.submit(PROMPTS[0], max_tokens=200 if cancelled else 6, ignore_eos=True, constraint=Anything())
        async for _ in handle:
            if cancelled:
                handle.cancel()
        return (await handle.aresult()).finish

    assert asyncio.run(asyncio.wait_for(read(), PATIENCE)) == ("cancelled" if cancelled else "length")


def test_a_batch_is_in_order_and_larger_than_the_queue(folder: Path) -> None:
    with load(folder, "cpu", 2, queue=2) as model:
        prompts = [p for p in PROMPTS for _ in range(2)]
        assert model.generate_batch(prompts, max_tokens=5, ignore_eos=True) == [alone(model, p, 5) for p in prompts]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            model.generate_batch([PROMPTS[0], [10**6]])
        with pytest.raises(ValueError, match="takes a list of prompts"):
            model.generate_batch("text")
        with pytest.raises(ValueError, match="this model is closed"):
            model.close()
            model.generate_batch(prompts)


def test_ends_by_stop_string_and_end_of_text(model: Model) -> None:
    text = alone(model, PROMPTS[1], 24)
    stop = text[4:7]
    one = model.submit(PROMPTS[1], max_tokens=24, ignore_eos=True, stop=stop).result(PATIENCE)
    assert (one.finish, one.text) == ("stop", text[: text.index(stop)])
    with_end = list(model.generate(PROMPTS[1], max_tokens=24))
    assert model.stats is not None
    other = model.submit(PROMPTS[1], max_tokens=24).result(PATIENCE)
    assert (other.finish, other.text) == (model.stats.finish, "".join(with_end))
    full = model.submit(PROMPTS[3], max_tokens=1000, ignore_eos=True).result(PATIENCE)
    assert full.finish == "context" and len(full.ids) == 96 - len(PROMPTS[3])


def test_cancelled_late_and_dropped_requests_end_and_free_their_place(model: Model) -> None:
    running = [model.submit(p, max_tokens=80, ignore_eos=True) for p in PROMPTS[:3]]
    first = [next(iter(h)) for h in running]
    waiting = model.submit(PROMPTS[0], max_tokens=80, ignore_eos=True)
    late = model.submit(PROMPTS[0], max_tokens=80, ignore_eos=True, deadline=1e-6)
    assert late.result(PATIENCE).finish == "deadline" and late.result().ids == ()
    waiting.cancel()
    assert waiting.result(PATIENCE).finish == "cancelled"
    for handle, piece in zip(running[:2], first, strict=False):
        handle.cancel()
        one = handle.result(PATIENCE)
        assert one.finish in ("cancelled", "length") and one.text.startswith(piece)
    running.clear()
    del handle
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while not model.engine.scheduler.idle and time.monotonic() < deadline:
        time.sleep(0.002)
    assert model.engine.scheduler.idle, "a dropped handle keeps its slot"


def test_refusals(folder: Path) -> None:
    with load(folder, "cpu", 1, queue=1) as model:
        wrong: list[tuple[str, Any]] = [
            ("max_tokens", 0),
            ("temperature", -1),
            ("priority", 0.5),
            ("deadline", 0),
            ("stop", [""]),
            ("seed", -1),
        ]
        for name, value in wrong:
            with pytest.raises(ValueError, match=name):
                model.submit(PROMPTS[0], **{name: value})
        with pytest.raises(ContextExceeded):
            model.submit([2] * 96)
        with model.engine.lock:  # no request has begun
            waiting = model.submit(PROMPTS[0], max_tokens=2, ignore_eos=True)
            with pytest.raises(QueueFull, match="try again in") as full:
                model.submit(PROMPTS[1])
            assert full.value.retry_after >= 1 and model.metrics().refused == 1
            with pytest.raises(TimeoutError, match="has not ended after"):
                waiting.result(0.02)
        assert waiting.result(PATIENCE).finish == "length"


def test_greater_priority_is_begun_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, "cpu", 1) as model:
        begun: list[int] = []
        start = model.engine.runner.start

        def noted(scheduled: Any) -> Any:
            begun.extend(request.n_prompt for request in scheduled.params)
            return start(scheduled)

        monkeypatch.setattr(model.engine.runner, "start", noted)
        with model.engine.lock:  # no request has begun
            handles = [
                model.submit(PROMPTS[i], max_tokens=2, ignore_eos=True, priority=p) for i, p in enumerate((0, 1, 5, 1))
            ]
        for handle in handles:
            handle.result(PATIENCE)
        assert begun == [len(PROMPTS[i]) for i in (2, 1, 3, 0)]


def test_a_lost_device_ends_every_request_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, "cpu", 2) as model:
        submit = model.engine.runner._submit
        left = [5]

        def lost(*args: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise DeviceLost("cpu: gone")
            return submit(*args)

        monkeypatch.setattr(model.engine.runner, "_submit", lost)
        handles = [model.submit(p, max_tokens=60, ignore_eos=True) for p in PROMPTS]
        for handle in handles:
            with pytest.raises(DeviceLost, match="gone"):
                handle.result(PATIENCE)
            with pytest.raises(DeviceLost):
                list(handle)
        assert model.metrics().finished == {"error": len(handles)} and model.metrics().running == 0


def test_closing_ends_requests_that_run_and_wait(folder: Path) -> None:
    model = load(folder, "cpu", 1)
    handles = [model.submit(p, max_tokens=90, ignore_eos=True) for p in PROMPTS[:3]]
    next(iter(handles[0]))
    model.close()
    for handle in handles:
        assert handle.done
        with pytest.raises(ValueError, match="this model is closed"):
            handle.result(PATIENCE)
    with pytest.raises(ValueError, match="this model is closed"):
        model.submit(PROMPTS[0])


def test_the_thread_ends_without_work_and_begins_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.engine.loop.IDLE", 0.01)
    with load(folder, "cpu", 1) as model:
        for _ in range(2):
            assert model.submit(PROMPTS[0], max_tokens=3, ignore_eos=True).result(PATIENCE).finish == "length"
            deadline = time.monotonic() + PATIENCE
            while model.engine._thread is not None and time.monotonic() < deadline:
                time.sleep(0.002)
            assert model.engine._thread is None
