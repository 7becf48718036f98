"""Whose turn it is with a model: one thread at a time, in the order in which they asked.

A generation has the turn while it works for a piece of text and gives it up with every piece: threads interleave as
iterators of a single thread do, and an iterator that was dropped holds nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """`with turns:` waits for the turn; a thread that has it may take it again."""

    def __init__(self) -> None:
        self._state = threading.Lock()  # of owner and line, for no longer than a look at them
        self._owner: int | None = None
        self._depth = 0
        self._line: deque[tuple[int, threading.Lock]] = deque()  # who waits, and what opens when it is their turn
        self._later: deque[Callable[[], object]] = deque()

    def __enter__(self) -> Turns:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        place = me, threading.Lock()
        place[1].acquire()
        with self._state:
            mine = self._owner is None
            if mine:
                self._owner = me
            else:
                self._line.append(place)
        if not mine:
            self._wait(place)
        self._depth = 1
        try:
            self._catch_up()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self._leave()

    def steps(self, inner: Generator[T, None, None]) -> Generator[T, None, None]:
        """What a generator yields, each of its steps in a turn of its own. When it is dropped, `inner` is closed `soon`."""
        try:
            while True:
                with self:
                    try:
                        item = next(inner)
                    except StopIteration:
                        return
                yield item
        finally:
            self.soon(inner.close)

    def soon(self, call: Callable[[], object]) -> None:
        """Call this in a turn: now where nobody has one, else when the one that runs ends, in its thread. Waits for nobody,
        because garbage is collected, and with it an iterator closed, in the midst of anything."""
        self._later.append(call)
        if not self._state.acquire(blocking=False):
            return  # whoever looks is about to have a turn, or the next one begins with this
        try:
            if self._owner is not None:
                return
            self._owner = threading.get_ident()
        finally:
            self._state.release()
        self._depth = 1
        self.__exit__(None, None, None)

    def _wait(self, place: tuple[int, threading.Lock]) -> None:
        try:
            place[1].acquire()  # until who is before hands over
        except BaseException:  # interrupted
            with self._state:
                waiting = place in self._line
                if waiting:
                    self._line.remove(place)
            if not waiting:
                self._leave()
            raise

    def _catch_up(self) -> None:
        while self._later:
            self._later.popleft()()

    def _leave(self) -> None:
        """Do what was put off, then hand over to the next in line."""
        self._depth = 1  # what was put off may take the turn again
        try:
            self._catch_up()
        finally:
            self._depth = 0
            with self._state:
                self._owner = None
                if self._line:
                    self._owner, gate = self._line.popleft()
                    gate.release()
