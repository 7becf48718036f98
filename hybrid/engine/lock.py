"""The engine's lock: reentrant and fair (FIFO).

A reader holds it for one engine step. Ctrl-C waits until the main thread releases it, so that guarded state is never
half changed (hybrid.core.interrupts; `allowed` marks long device waits).
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
    """A reentrant FIFO lock for `with`."""

    def __init__(self) -> None:
        self._state = threading.Lock()  # guards owner and queue; held briefly
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()  # waiting threads and their locks
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
        """Iterate `inner` with the lock held for each step; dropping the iterator closes `inner` by `call_soon`."""
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
        """Run `call` with the lock held: now if it is free, else when its holder releases it. Never waits, because
        the garbage collector may call it anywhere."""
        self._deferred.append(call)
        with interrupts.held():
            if not self._state.acquire(blocking=False):
                return  # the thread with `_state` will run the deferred calls
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
        """Run deferred calls, then hand the lock to the first waiter."""
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
