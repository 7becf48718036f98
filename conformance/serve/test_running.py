"""The feed of a request, as its reader takes it, and the bytes of a connection: with handles whose events the test
sets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.core.errors import DeviceLost
from hybrid.engine.handle import Handle
from hybrid.engine.request import Event, Request, Wakeups
from hybrid.serve import running
from hybrid.serve.connection import FULL, Gathered
from hybrid.serve.errors import ApiError
from hybrid.serve.running import Feed, Item, Job


class Asked:
    """A feed of some jobs, its streams, and the server's log of it."""

    def __init__(self, count: int) -> None:
        self.requests = [Request(i, [1]) for i in range(count)]
        self.lost: list[BaseException] = []
        self.noted: list[str] = []
        handles = iter(Handle(r) for r in self.requests)
        model = SimpleNamespace(submit=lambda prompt, **options: next(handles))
        backend: Any = SimpleNamespace(model=model, lost=lambda model, error: self.lost.append(error))
        metrics: Any = SimpleNamespace(
            first=SimpleNamespace(observe=lambda seconds: self.noted.append("first")),
            between=lambda seconds, tokens: self.noted.append(f"{tokens} later"),
        )
        self.feed = Feed(backend, metrics, [Job([1], {})] * count, 0.0)

    def say(self, which: int, *ids: int, done: bool = False, error: BaseException | None = None) -> None:
        request, wakeups = self.requests[which], Wakeups()
        for i in ids:
            request.ids.append(i)
            request.events.append(Event(chr(96 + i), (i,)))
        if done or error is not None:
            request.end("length", error)
        request.notify(wakeups)
        wakeups.send()


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def summary(items: list[Item]) -> list[tuple[int, list[int], bool]]:
    return [(i.choice, [t for e in i.events for t in e.ids], i.done is not None) for i in items]


def test_a_batch_is_all_that_has_come_since_the_last() -> None:
    async def run() -> None:
        a = Asked(2)
        batches = a.feed.batches()
        a.say(0, 1)
        assert summary(await anext(batches)) == [(0, [1], False)]
        a.say(0, 2, 3)
        a.say(1, 4, 5, done=True)
        assert summary(await anext(batches)) == [(0, [2, 3], False), (1, [4, 5], True)]
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "an empty batch"
        a.say(0, done=True)
        assert summary(await waiting) == [(0, [], True)]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        assert a.noted == ["first", "2 later", "first"] and not any(s.cancelled for s in a.requests)

    in_loop(run)


def test_events_before_an_error_come_first_and_a_loss_is_reported() -> None:
    async def run() -> None:
        a = Asked(2)
        batches = a.feed.batches()
        a.say(1, 1, error=DeviceLost("gone"))
        assert summary(await anext(batches)) == [(1, [1], False)]
        with pytest.raises(ApiError) as raised:
            await anext(batches)
        assert raised.value.status == 503 and [str(e) for e in a.lost] == ["gone"]
        assert a.requests[0].cancelled, "the other choice continues without a reader"

    in_loop(run)


def test_silence_is_reported_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "HEARTBEAT", 0.02)

    async def run() -> None:
        a = Asked(1)
        batches = a.feed.batches()
        assert [await anext(batches) for _ in range(3)] == [[], [], []]
        a.say(0, 1, done=True)
        found = await anext(batches)
        while not found:  # silence may have been noticed just before
            found = await anext(batches)
        assert summary(found) == [(0, [1], True)]

    in_loop(run)


class Sink:
    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


def test_a_loop_iteration_is_one_write_up_to_the_buffer_size() -> None:
    async def run() -> None:
        sink: Any = Sink()
        wire = Gathered(sink, asyncio.get_running_loop())
        wire.write(b"a")
        wire.write(b"b")
        assert sink.said == []
        await asyncio.sleep(0)
        assert sink.said == [b"ab"]
        wire.write(b"c" * FULL)
        assert len(sink.said[-1]) == FULL, "kept although it is full: the writer is not paused"
        wire.write(b"d")
        wire.close()
        assert sink.said[-1] == b"d" and sink.closing
        wire.write(b"e")
        await asyncio.sleep(0)
        assert sink.said[-1] == b"d", "written to a connection that is closed"

    in_loop(run)
