"""Threads for work that would hold up the event loop: clients take turns, and within a client shorter work goes
first."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from hybrid.serve.errors import from_engine

T = TypeVar("T")
Parts = Generator[object, None, T]
"""Work in parts: what it yields is dropped, what it returns is its result."""

QUANTUM = 0.01
"""Seconds that work in parts runs before somebody else has a turn."""
LONG = 1 << 16
"""Work of this size or more goes in order of arrival: begun work keeps memory, so it ends before the next begins."""


class _Work(NamedTuple):
    size: int
    number: int
    parts: Parts[Any]
    done: asyncio.Future[Any]


class FairPool:
    """Belongs to one event loop, except that its work runs in threads."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, f"hybrid {name}")
        self._idle = threads
        self._number = 0
        self._waiting: OrderedDict[str, list[_Work]] = OrderedDict()  # by client, who comes next first

    async def run(self, client: str, parts: Parts[T], size: int = 0) -> T:
        """The result of work in parts; its errors as ApiError. size: anything that grows with the time it takes."""
        self._number += 1
        work = _Work(min(size, LONG), self._number, parts, asyncio.get_running_loop().create_future())
        self._wait(client, work)
        self._start()
        try:
            found: T = await work.done
        except Exception as error:
            raise from_engine(error) from None
        return found

    async def call(self, client: str, function: Callable[..., T], *args: Any) -> T:
        """The result of a function that takes a while."""

        def whole() -> Parts[T]:
            yield None
            return function(*args)

        return await self.run(client, whole())

    def _wait(self, client: str, work: _Work) -> None:
        queue = self._waiting.setdefault(client, [])
        queue.append(work)
        queue.sort(key=lambda w: (w.size, w.number))

    def _start(self) -> None:
        while self._idle and self._waiting:
            client, queue = next(iter(self._waiting.items()))
            work = queue.pop(0)
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
            self._wait(client, work)
        elif not work.done.done():
            if error is None:
                work.done.set_result(result)
            else:
                work.done.set_exception(error)
        self._start()


def _quantum(parts: Parts[Any]) -> tuple[bool, Any]:
    """(whether it has ended, its result)."""
    until = time.monotonic() + QUANTUM
    try:
        next(parts)
        while time.monotonic() < until:
            next(parts)
    except StopIteration as ended:
        return True, ended.value
    return False, None
