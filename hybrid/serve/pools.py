"""Thread pool for work that would block the event loop: round-robin over clients, shortest work first within a
client."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

from hybrid.serve.errors import from_engine

T = TypeVar("T")
Parts = Generator[object, None, T]
"""Work that can be preempted at each yield; its return value is the result."""

QUANTUM = 0.01
"""Time slice of work in seconds before another client's work runs."""
LONG = 1 << 16
"""Work of this size or more runs in order of arrival. Started work holds memory, so it finishes before the next
starts."""


class _Work(NamedTuple):
    size: int
    number: int
    parts: Parts[Any]
    done: asyncio.Future[Any]


class FairPool:
    """A fair thread pool of one event loop."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, f"hybrid {name}")
        self._idle = threads
        self._number = 0
        self._waiting: OrderedDict[str, list[_Work]] = OrderedDict()  # heaps by client, next one first

    async def run(self, client: str, parts: Parts[T], size: int = 0) -> T:
        """The result of work in parts; its errors as ApiError. size: a measure of its run time."""
        self._number += 1
        work = _Work(min(size, LONG), self._number, parts, asyncio.get_running_loop().create_future())
        heappush(self._waiting.setdefault(client, []), work)
        self._start()
        try:
            found: T = await work.done
        except Exception as error:
            raise from_engine(error) from None
        return found

    async def call(self, client: str, function: Callable[..., T], *args: Any) -> T:
        """The result of a long-running function."""

        def whole() -> Parts[T]:
            yield None
            return function(*args)

        return await self.run(client, whole())

    def _start(self) -> None:
        while self._idle and self._waiting:
            client, queue = next(iter(self._waiting.items()))
            work = heappop(queue)
            self._waiting.move_to_end(client)
            if not queue:
                del self._waiting[client]
            if work.done.cancelled():
                work.parts.close()
                continue
            self._idle -= 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, _quantum, work.parts)
            running.add_done_callback(lambda f, c=client, w=work: self._ran(c, w, f))  # type: ignore[misc]

    def _ran(self, client: str, work: _Work, running: asyncio.Future[tuple[bool, Any]]) -> None:
        self._idle += 1
        error = running.exception()
        whole, result = (True, None) if error is not None else running.result()
        if not whole:
            heappush(self._waiting.setdefault(client, []), work)
        elif not work.done.done():
            if error is None:
                work.done.set_result(result)
            else:
                work.done.set_exception(error)
        self._start()


def _quantum(parts: Parts[Any]) -> tuple[bool, Any]:
    """Run one time slice: (whether the work has ended, its result)."""
    until = time.monotonic() + QUANTUM
    try:
        next(parts)
        while time.monotonic() < until:
            next(parts)
    except StopIteration as ended:
        return True, ended.value
    return False, None
