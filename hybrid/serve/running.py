"""The engine's handles of one HTTP request: submitted all or none, their events gathered into batches, cancelled with it.

Whoever takes batches gets everything that has come since the last one: a reader that is slow, or a loop that is busy, gets
fewer and larger pieces instead of falling behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybrid.core.errors import DeviceLost
from hybrid.serve.backend import Backend
from hybrid.serve.errors import from_engine
from hybrid.serve.metrics import Metrics

HEARTBEAT = 15.0
"""Seconds without a token after which an empty batch comes, so that a stream can show that it is alive."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence: a prompt's ids and the options of Model.submit."""

    prompt: Sequence[int]
    options: Mapping[str, Any]


class Item(NamedTuple):
    """What one choice has brought: events in order, and its completion if it has ended."""

    choice: int
    events: list[Any]
    done: Any | None


class Feed:
    """Runs jobs on the backend's model. ApiError where one is refused: then none runs."""

    def __init__(self, backend: Backend, metrics: Metrics, jobs: Sequence[Job], began: float) -> None:
        self._backend, self._metrics, self._model = backend, metrics, backend.model
        self._began = began
        self._pending: dict[int, tuple[list[Any], Any]] = {}
        self._error: BaseException | None = None
        self._wake = asyncio.Event()
        self._handles: list[Any] = []
        self._left = len(jobs)
        try:
            for job in jobs:
                self._handles.append(self._model.submit(job.prompt, **job.options))
        except BaseException as error:
            self.cancel()
            if isinstance(error, DeviceLost):
                backend.lost(self._model, error)
            if isinstance(error, Exception):
                raise from_engine(error) from None
            raise
        self._tasks = [asyncio.create_task(self._pump(i, h)) for i, h in enumerate(self._handles)]

    async def batches(self) -> AsyncIterator[list[Item]]:
        """Until every job has ended; an empty one after HEARTBEAT seconds of silence. ApiError where a job failed."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._pending and self._error is None:
                    if not self._left:
                        return
                    self._wake.clear()
                    timer = loop.call_later(HEARTBEAT, self._wake.set)
                    try:
                        await self._wake.wait()
                    finally:
                        timer.cancel()
                if self._error is not None:
                    raise from_engine(self._error) from None
                taken, self._pending = self._pending, {}
                yield [Item(i, events, done) for i, (events, done) in taken.items()]
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End what still runs; may be called again."""
        for handle in self._handles:
            if not handle.done:
                handle.cancel()

    def _put(self, index: int, event: Any, done: Any) -> None:
        events, _ = self._pending.setdefault(index, ([], None))
        if event is not None:
            events.append(event)
        self._pending[index] = events, done
        self._wake.set()

    async def _pump(self, index: int, handle: Any) -> None:
        last = 0.0
        try:
            async for event in handle.aevents():
                now = time.perf_counter()
                if event.ids:
                    if last:
                        self._metrics.between(now - last, len(event.ids))
                    else:
                        self._metrics.first.observe(now - self._began)
                    last = now
                self._put(index, event, None)
            done = handle.result(timeout=1.0)
            self._left -= 1
            self._put(index, None, done)
        except Exception as error:
            if isinstance(error, DeviceLost):
                self._backend.lost(self._model, error)
            self._error = self._error or error
            self._left -= 1
            self._wake.set()
