"""The engine handles of one HTTP request: submitted all or none, with batched events, cancelled with the request.

A batch has all events since the previous one, so that a slow reader or a busy event loop gets fewer, larger batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybrid.core.errors import DeviceLost
from hybrid.engine.handle import Handle
from hybrid.engine.request import Event
from hybrid.serve.backend import Backend
from hybrid.serve.errors import ApiError, from_engine
from hybrid.serve.metrics import Metrics

HEARTBEAT = 15.0
"""Seconds without a token before an empty batch, for keep-alive events in a stream."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence: a prompt's ids and the options of Model.submit."""

    prompt: Sequence[int]
    options: Mapping[str, Any]


class Item(NamedTuple):
    """New events of a choice, in order, and its completion if it has ended."""

    choice: int
    events: list[Any]
    done: Any | None


class Feed:
    """Runs jobs on the backend's model. If one is refused, raises ApiError and runs none."""

    def __init__(self, backend: Backend, metrics: Metrics, jobs: Sequence[Job], began: float) -> None:
        self._backend, self._metrics, self._model = backend, metrics, backend.model
        self._wake = asyncio.Event()
        self._handles: list[Handle] = []
        try:
            for job in jobs:
                self._handles.append(self._model.submit(job.prompt, **job.options))
        except Exception as error:
            self.cancel()
            raise self._refusal(error) from None
        for handle in self._handles:
            handle.watch(self._wake)
        self._open = {i: _Read(began) for i in range(len(jobs))}

    async def batches(self) -> AsyncIterator[list[Item]]:
        """Yield batches until every job has ended, and an empty one after HEARTBEAT seconds without events. ApiError if
        a job fails."""
        silence = _Silence(self._wake)
        try:
            while self._open:
                self._wake.clear()
                if items := self._take():
                    silence.broken()
                    yield items
                elif silence.long():
                    yield []
                if self._open:
                    await self._wake.wait()  # set by the loop only, so other ready tasks run before the next batch
        finally:
            silence.end()
            self.cancel()

    def cancel(self) -> None:
        """Cancel running jobs. Idempotent."""
        for handle in self._handles:
            if not handle.done:
                handle.cancel()

    def _take(self) -> list[Item]:
        """Items since the last call."""
        items = []
        for i, read in list(self._open.items()):
            events, ended = self._handles[i].news(read.events)
            done = None
            if ended:
                try:
                    done = self._handles[i].result(0)
                except Exception as error:
                    if not events:
                        raise self._refusal(error) from None
                    self._wake.set()  # raised after delivering earlier events
                else:
                    del self._open[i]
            if events or done is not None:
                read.take(events, self._metrics)
                items.append(Item(i, events, done))
        return items

    def _refusal(self, error: Exception) -> ApiError:
        if isinstance(error, DeviceLost):
            self._backend.lost(self._model, error)
        return from_engine(error)


class _Read:
    """Read position and time of a choice. began: time.perf_counter() at the request's arrival."""

    def __init__(self, began: float) -> None:
        self.events, self._tokens, self._last = 0, 0, began

    def take(self, events: Sequence[Event], metrics: Metrics) -> None:
        self.events += len(events)
        if not (tokens := sum(len(e.ids) for e in events)):
            return
        now = time.perf_counter()
        if self._tokens:
            metrics.between(now - self._last, tokens)
        else:
            metrics.first.observe(now - self._last)
        self._tokens, self._last = self._tokens + tokens, now


class _Silence:
    """Sets an event after HEARTBEAT seconds without tokens, with one timer for any number of batches."""

    def __init__(self, mark: asyncio.Event) -> None:
        self._mark, self._loop = mark, asyncio.get_running_loop()
        self._heard, self._is_long = self._loop.time(), False
        self._timer = self._loop.call_later(HEARTBEAT, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._heard >= HEARTBEAT:
            self._heard, self._is_long = now, True
            self._mark.set()
        self._timer = self._loop.call_at(self._heard + HEARTBEAT, self._look)

    def broken(self) -> None:
        self._heard, self._is_long = self._loop.time(), False

    def long(self) -> bool:
        """True once for each HEARTBEAT seconds of silence."""
        was, self._is_long = self._is_long, False
        return was

    def end(self) -> None:
        self._timer.cancel()
