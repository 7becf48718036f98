"""The lock that threads share an engine by: reentrant, and given in the order in which threads asked.

A generation holds it while it works for one piece of text and releases it with every piece: threads interleave as
iterators of a single thread do, and an iterator that was dropped holds nothing. Ctrl-C waits until the main thread
releases it, so that what it guards is never half changed (hybrid.core.interrupts: `allowed`, around what may take
long).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TypeVar

from hybrid.core import interrupts

T = TypeVar("T")


class EngineLock:
    """`with lock:` waits until it is this thread's; a thread that holds it may take it again."""

    def __init__(self) -> None:
        self._state = threading.Lock()  # of owner and queue, held for no longer than a look at them
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()  # threads that wait, and what each of them waits on
        self._deferred: deque[Callable[[], object]] = deque()

    def __enter__(self) -> EngineLock:
        interrupts.hold()
        try:
            self._take()
        except BaseException:
            interrupts.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave()
        finally:
            interrupts.release()

    def steps(self, inner: Generator[T, None, None]) -> Generator[T, None, None]:
        """What a generator yields, the lock held for each of its steps. When this is dropped, `inner` is closed by
        `call_soon`."""
        try:
            while True:
                with self, interrupts.allowed():
                    try:
                        item = next(inner)
                    except StopIteration:
                        return
                yield item
        finally:
            self.call_soon(inner.close)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call this with the lock held: now where no thread holds it, else in the thread that does, when it releases
        it. Never waits, because garbage is collected, and with it an iterator closed, in the midst of anything."""
        self._deferred.append(call)
        with interrupts.held():
            if not self._state.acquire(blocking=False):
                return  # whoever looks is about to take or release the lock, and runs what was deferred
            try:
                if self._owner is not None:
                    return
                self._owner = threading.get_ident()
            finally:
                self._state.release()
            self._depth = 1
            self._leave()

    def _take(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        waiter = None
        with self._state:
            if self._owner is None:
                self._owner = me
            else:
                waiter = me, threading.Lock()
                waiter[1].acquire()
                self._queue.append(waiter)
        if waiter is not None:
            self._wait(waiter)
        self._depth = 1
        try:
            if self._deferred:
                self._run_deferred()
        except BaseException:
            self._release()
            raise

    def _leave(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._release()

    def _wait(self, waiter: tuple[int, threading.Lock]) -> None:
        try:
            with interrupts.allowed():
                waiter[1].acquire()  # released by the thread before
        except BaseException:  # interrupted
            with self._state:
                waiting = waiter in self._queue
                if waiting:
                    self._queue.remove(waiter)
            if not waiting:
                self._release()
            raise

    def _run_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def _release(self) -> None:
        """Run what was deferred, then hand the lock to the first of the queue."""
        self._depth = 1  # deferred calls may take the lock again
        try:
            if self._deferred:
                self._run_deferred()
        finally:
            self._depth = 0
            with self._state:
                self._owner = None
                if self._queue:
                    self._owner, waiting = self._queue.popleft()
                    waiting.release()
