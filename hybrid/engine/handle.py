"""The caller's handle of a request: iterator, async iterator, result. Any number of readers, each from the beginning, in
threads or asyncio. A slow reader blocks nothing: events wait in host memory, at most one per token. Dropping the handle
cancels its request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from hybrid.core.errors import QueueFull
from hybrid.engine.request import Completion, Event, Request
from hybrid.engine.runner import OF_ONE


class Handle:
    """Iterating (also `async for`) yields text, `events` and `aevents` yield tokens, `result` waits for the end. All raise
    the error of a failed request. step: runs one engine step in the reader's thread (None: the engine has a thread)."""

    def __init__(self, request: Request, step: Callable[[], object] | None = None) -> None:
        self.request, self._step = request, step

    def __iter__(self) -> Iterator[str]:
        """Pieces of text; joined they are `Completion.text`."""
        return (e.text for e in self.events() if e.text)

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[str]:
        async for event in self.aevents():
            if event.text:
                yield event.text

    def events(self) -> Iterator[Event]:
        """Every event from the first on."""
        at = 0  # the generator keeps the handle alive
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
        """Events from the `at`-th on, without waiting, and whether they are all."""
        return self.request.news(at)

    def watch(self, mark: asyncio.Event) -> None:
        """Set `mark` on every later event, in the running event loop; one mark may watch many handles."""
        self.request.watch(mark)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.request.finish is not None

    def cancel(self) -> None:
        """End it before its next pass (finish `cancelled`). No effect after its end."""
        self.request.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the result. TimeoutError after `timeout` seconds (the request continues); the request's own error."""
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
            self.request.cancel()  # no reader is left


def outcomes(requests: Iterable[Callable[[], Handle]]) -> Iterator[Completion | Exception]:
    """The completion or error of each request, in order. Errors of the device (not in OF_ONE) are raised and cancel the
    rest. Submits as many as the queue takes. Dropping the iterator cancels the rest."""
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
                    if not running:  # other clients fill the queue
                        raise
                    yield outcome(running.popleft())
        while running:
            yield outcome(running.popleft())
    finally:
        for one in running:
            if isinstance(one, Handle):
                one.cancel()
