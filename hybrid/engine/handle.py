"""What `Model.submit` returns: a request that runs in the background, read from any thread or from asyncio, by any
number of readers, each from the beginning. A reader that stops reading holds nobody up: events wait in host memory, at
most one for each token; a handle that nobody holds any more cancels its request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hybrid.engine.stats import Finish


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token, its natural log probability, and those of the most likely tokens, the best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """Text that can be passed on, often "" (an unfinished character, the beginning of a stop string), and the tokens
    since the event before."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `ids`, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. cached: those of the prompt that were not computed, because the KV cache held them;
    completion: generated, the end-of-text token included; drafted: guesses that passes verified, and of these those
    that were right."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the host's clock since the request was submitted; None for what never came."""

    queued: float | None
    """Until its first pass was prepared."""
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that has ended. finish: eos, stop, length, context, cancelled or deadline (with an error there is
    none)."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage
    timings: Timings


class Wakes:
    """Readers with news whose event loops are still to be told: each loop is woken once for all of them."""

    def __init__(self) -> None:
        self._marks: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, mark: asyncio.Event) -> None:
        self._marks.setdefault(loop, []).append(mark)

    def send(self) -> None:
        while self._marks:
            loop, marks = self._marks.popitem()
            with contextlib.suppress(RuntimeError):  # that loop is closed: its readers are gone
                loop.call_soon_threadsafe(_set_all, marks)


def _set_all(marks: list[asyncio.Event]) -> None:
    for mark in marks:
        mark.set()


class Pieces:
    """The text of one request whose only reader runs its passes itself (serving.py), or finds that others have. Guarded
    by the engine's lock."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque()
        """What the reader has not taken yet."""
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.cancelled = False

    def push(self, event: Event, wakes: Wakes) -> None:
        if event.text:
            self.texts.append(event.text)

    def end(self, completion: Completion | None, error: BaseException | None, wakes: Wakes) -> None:
        self.completion, self.error = completion, error


class Stream:
    """Events of one request, from the thread that owns the device to its readers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        """Somebody wants it to end; seen between two passes."""
        self.wake: Callable[[], object] = lambda: None
        """Tells the thread that owns the device that `cancelled` was set."""
        self._changed = threading.Condition()
        self._sleeping = 0  # threads that wait
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    @property
    def ended(self) -> bool:
        return self.completion is not None or self.error is not None

    def push(self, event: Event, wakes: Wakes) -> None:
        """wakes: told of the readers in event loops; its caller sends them."""
        with self._changed:
            self.events.append(event)
            self._tell(wakes)

    def end(self, completion: Completion | None, error: BaseException | None, wakes: Wakes) -> None:
        """The last that happens to it; what comes later is dropped."""
        with self._changed:
            if not self.ended:
                self.completion, self.error = completion, error
                self._tell(wakes)

    def cancel(self) -> None:
        self.cancelled = True
        self.wake()

    def follow(self) -> Iterator[Event]:
        """Events as they come, from the first; then the error, where there was one."""
        at = 0
        while True:
            with self._changed:
                while at == len(self.events) and not self.ended:
                    self._sleep(1.0)
                fresh = self.events[at:]
            if not fresh:
                self._end_of_reading()
                return
            at += len(fresh)
            yield from fresh

    async def follow_async(self) -> AsyncIterator[Event]:
        """As `follow`, without a thread."""
        at, mark = 0, asyncio.Event()
        try:
            self.watch(mark)
            while True:
                mark.clear()
                fresh, ended = self.news(at)
                if not fresh and ended:
                    self._end_of_reading()
                    return
                at += len(fresh)
                for event in fresh:
                    yield event
                if not fresh:
                    await mark.wait()
        finally:
            self.unwatch(mark)

    def news(self, at: int) -> tuple[list[Event], bool]:
        """Events from the `at`-th on, and whether no more will come."""
        with self._changed:
            return self.events[at:], self.ended

    def watch(self, mark: asyncio.Event) -> None:
        """Set a mark of the running event loop at whatever happens from now on."""
        with self._changed:
            self._waiting.add((asyncio.get_running_loop(), mark))

    def unwatch(self, mark: asyncio.Event) -> None:
        with self._changed:
            self._waiting = {w for w in self._waiting if w[1] is not mark}

    def wait(self, timeout: float | None) -> None:
        """Until it has ended. TimeoutError."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.ended:
                left = 1.0 if until is None else min(1.0, until - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"the request has not ended after {timeout:g} s: wait longer, or cancel() it")
                self._sleep(left)

    def _sleep(self, seconds: float) -> None:
        self._sleeping += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._sleeping -= 1

    def _tell(self, wakes: Wakes) -> None:
        if self._sleeping:
            self._changed.notify_all()
        for mark in self._waiting:
            wakes.add(*mark)

    def _end_of_reading(self) -> None:
        if self.error is not None:
            raise self.error


class Handle:
    """A submitted request. Iterating (also with `async for`) gives pieces of text, `events` and `aevents` every token;
    `result` waits for the whole. A request that failed raises its error in all of them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come; joined they are `Completion.text`."""
        return (e.text for e in self.events() if e.text)

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[str]:
        async for event in self.aevents():
            if event.text:
                yield event.text

    def events(self) -> Iterator[Event]:
        """Every event from the first on, as it comes."""
        yield from self._stream.follow()  # a generator of this method: while it is held, so is the handle

    async def aevents(self) -> AsyncIterator[Event]:
        """As `events`, for asyncio."""
        async for event in self._stream.follow_async():
            yield event

    def news(self, at: int) -> tuple[list[Event], bool]:
        """Events from the `at`-th on, without waiting, and whether no more will come: then `result` has the end."""
        return self._stream.news(at)

    def watch(self, mark: asyncio.Event) -> None:
        """Have a mark of the running event loop set when there is news: one mark may watch many handles."""
        self._stream.watch(mark)

    @property
    def done(self) -> bool:
        """Has it ended, whatever the reason?"""
        return self._stream.ended

    def cancel(self) -> None:
        """End it before its next pass (finish `cancelled`); nothing happens where it has ended."""
        self._stream.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end. TimeoutError after `timeout` seconds (the request goes on); the error of a request that
        failed."""
        self._stream.wait(timeout)
        if self._stream.error is not None:
            raise self._stream.error
        assert self._stream.completion is not None
        return self._stream.completion

    async def aresult(self) -> Completion:
        """As `result`, for asyncio."""
        async for _ in self.aevents():
            pass
        return self.result()

    def __del__(self) -> None:
        if not self._stream.ended:
            self._stream.cancel()  # nobody can read it any more
