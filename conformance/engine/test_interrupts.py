"""Ctrl-C at any line of the engine's work for a reader: that text ends, all else is intact."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hybrid
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid.core import interrupts
from hybrid.engine.request import Options
from hybrid.model import Model

ROOT = str(Path(hybrid.__file__).parent)
OTHER: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 3}
PATIENCE = 60.0  # test timeouts in seconds; no test takes one

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals as POSIX has them")


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "a handler was not restored"


def at_line(job: Callable[[], object], wanted: int = -1) -> int:
    """Run a job and send it SIGINT after so many lines of the package; returns the lines that ran."""
    count = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == wanted:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename.startswith(ROOT) else None)
    try:
        job()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("how", [{}, {"speculate": 2}, {"logprobs": 1}])
def test_an_interrupt_at_any_line_ends_one_text_and_nothing_else(tmp_path: Path, how: dict[str, Any]) -> None:
    load = {k: v for k, v in how.items() if k == "speculate"}
    options = {k: v for k, v in how.items() if k != "speculate"}
    with hybrid.load(write_hf(tmp_path, tiny(), dtype="f32"), "cpu", ctx=96, slots=2, **load) as model:

        def read() -> None:
            pieces = model.generate([2, 4, 5, 4, 5, 6], max_tokens=8, ignore_eos=True, **options)
            try:
                for _ in pieces:
                    pass
            finally:
                pieces.close()

        def text(**more: Any) -> str:
            return "".join(model.generate([2, 4, 5, 4, 5, 6], max_tokens=12, ignore_eos=True, **more))

        alone, other = text(**options), model.submit([2, 7, 8, 9], **OTHER).result(PATIENCE).text
        lines, draw, ended = at_line(read), random.Random(5), 0
        for _ in range(1000 if LONG else 24):
            beside, at = model.submit([2, 7, 8, 9], **OTHER), draw.randrange(1, lines)
            try:
                at_line(read, at)
            except KeyboardInterrupt:
                ended += 1
            assert beside.result(PATIENCE).text == other, at
            assert text(**options) == alone, at
            assert not model.engine._requests and not model.engine.scheduler.in_flight, at
            assert set(model.engine.runner.blocks.used.values()) == {0}, at
        assert ended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with hybrid.load(write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32"), "cpu", ctx=96, slots=2) as made:
        yield made


def test_an_interrupt_within_a_decision_waits_for_its_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = model.engine, []
    whole = engine.scheduler.commit
    other = model.submit([2, 7, 8, 9], **OTHER).result(PATIENCE).text

    def commit(done: Any, *tokens: Any) -> Any:
        news = whole(done, *tokens)
        if not sent and beside.done:  # it has ended, and the engine has not recorded that
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return news

    monkeypatch.setattr(engine.scheduler, "commit", commit)
    beside = engine.generate([2, 7, 8, 9], Options(**OTHER))  # the same reader runs its passes
    with pytest.raises(KeyboardInterrupt):
        for _ in model.generate([2, 4, 5, 4, 5, 6], max_tokens=64, ignore_eos=True):
            pass
    assert sent and beside.result(10.0).text == other
    assert (
        not engine._requests and not engine.scheduler.in_flight and set(model.engine.runner.blocks.used.values()) == {0}
    )


def test_an_interrupt_ends_the_wait_for_the_lock(model: Model) -> None:
    lock, taken, done = model.engine.lock, threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(5.0)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    taken.wait(PATIENCE)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), lock:
        done.set()
    assert not done.is_set(), "it came when the lock was free"
    done.set()
    thread.join(PATIENCE)
    timer.join(PATIENCE)
    with lock:  # the lock is free
        assert lock._depth == 1


def test_an_interrupt_waits_for_the_outermost_block() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            seen.append("inner")
        seen.append("outer")
    assert seen == ["inner", "outer"]


def test_allowed_interrupts_come_at_once_also_pending_ones() -> None:
    seen = []
    with interrupts.held():
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            with interrupts.held():
                seen.append("held again")
            signal.raise_signal(signal.SIGINT)
            seen.append("not reached")
        signal.raise_signal(signal.SIGINT)
        seen.append("held")
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            seen.append("not reached")
        with interrupts.allowed():
            pass
    assert seen == ["held again", "held"]


def test_a_handler_of_ones_own_is_called_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            assert not called
        assert called == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts.held(), interrupts.allowed():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_neither_hold_nor_are_held() -> None:
    with interrupts.held():
        handler = signal.getsignal(signal.SIGINT)

        def elsewhere() -> None:
            with interrupts.held(), interrupts.allowed():
                pass

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(PATIENCE)
        assert signal.getsignal(signal.SIGINT) is handler is not signal.default_int_handler
