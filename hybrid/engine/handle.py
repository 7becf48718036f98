"""What a caller holds of a request: an iterator, an asynchronous iterator, a result. Any number of readers, each from the
beginning, from threads or asyncio. A reader that stops reading holds nobody up: events wait in host memory, at most one
for each token. A handle that nobody holds any more cancels its request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from hybrid.core.errors import QueueFull
from hybrid.engine.request import Completion, Event, Request
from hybrid.engine.runner import OF_ONE


class Handle:
    """A submitted request. Iterating (also with `async for`) gives pieces of text, `events` and `aevents` every token;
    `result` waits for the whole. A request that failed raises its error in all of them. step: runs a step of the engine;
    then whoever iterates runs the passes (None: a thread does)."""

    def __init__(self, request: Request, step: Callable[[], object] | None = None) -> None:
        self.request, self._step = request, step

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
        at = 0  # a generator of this method: while it is held, so is the handle
        while True:
            fresh, ended = self.request.news(at)
            at += len(fresh)
            yield from fresh
            if fresh:
                continue
            if ended:
                break
            if self._step is not None:
                self._step()
            else:
                self.request.wait(at, 1.0)
        if self.request.error is not None:
            raise self.request.error

    async def aevents(self) -> AsyncIterator[Event]:
        """As `events`, for asyncio."""
        at, mark = 0, asyncio.Event()
        try:
            self.request.watch(mark)
            while True:
                mark.clear()
                fresh, ended = self.request.news(at)
                at += len(fresh)
                for event in fresh:
                    yield event
                if fresh:
                    continue
                if ended:
                    break
                await mark.wait()
        finally:
            self.request.unwatch(mark)
        if self.request.error is not None:
            raise self.request.error

    def news(self, at: int) -> tuple[list[Event], bool]:
        """Events from the `at`-th on, without waiting, and whether no more will come: then `result` has the end."""
        return self.request.news(at)

    def watch(self, mark: asyncio.Event) -> None:
        """Have a mark of the running event loop set when there is news: one mark may watch many handles."""
        self.request.watch(mark)

    @property
    def done(self) -> bool:
        """Has it ended, whatever the reason?"""
        return self.request.finish is not None

    def cancel(self) -> None:
        """End it before its next pass (finish `cancelled`); nothing happens where it has ended."""
        self.request.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end. TimeoutError after `timeout` seconds (the request goes on); the error of a request that
        failed."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.request.finish is None:
            left = 1.0 if until is None else min(1.0, until - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"the request has not ended after {timeout:g} s: wait longer, or cancel() it")
            if self._step is not None:
                self._step()
            else:
                self.request.wait(len(self.request.events), left)
        if self.request.error is not None:
            raise self.request.error
        return self.request.completion

    async def aresult(self) -> Completion:
        """As `result`, for asyncio."""
        async for _ in self.aevents():
            pass
        return self.result()

    def __del__(self) -> None:
        if self.request.finish is None:
            self.request.cancel()  # nobody can read it any more


def outcomes(requests: Iterable[Callable[[], Handle]]) -> Iterator[Completion | Exception]:
    """What each request became, in their order: its completion, or what was wrong with it (OF_ONE; any other error is the
    device's, is raised, and cancels the rest). As many are submitted as the queue takes. Whoever drops the iterator
    cancels the rest."""
    running = deque[Handle | Exception]()

    def outcome(of: Handle | Exception) -> Completion | Exception:
        if isinstance(of, Exception):
            return of
        try:
            return of.result()
        except OF_ONE as error:
            return error

    try:
        for submit in requests:
            while True:
                try:
                    running.append(submit())
                    break
                except OF_ONE as error:
                    running.append(error)
                    break
                except QueueFull:
                    if not running:  # others fill the queue
                        raise
                    yield outcome(running.popleft())
        while running:
            yield outcome(running.popleft())
    finally:
        for one in running:
            if isinstance(one, Handle):
                one.cancel()
