"""Where Ctrl-C may end what the main thread does.

Python raises KeyboardInterrupt between any two instructions of the main thread. Where it has a lock, or changes what
makes no sense half changed, the interruption waits for the end of the block:

    with interrupts.held():
        ...
        with interrupts.allowed():  # what may take long, and leaves everything in order wherever it ends
            ...

Only Ctrl-C waits (SIGINT, with whatever handler it has): other signals end the process, or their handlers raise
nothing. Other threads are never interrupted, and both do nothing there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# What `signal` is made of, without its conversions to enumerations: 5 us a call, ten times that of the system's.
_set_handler, _handler_of = _signal.signal, _signal.getsignal

_depth = 0  # blocks that hold, around what the main thread does now
_came = False  # within them
_handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler  # what Ctrl-C calls outside of them


def hold() -> None:
    """Until `release`, which may be in another function: what `held` does."""
    global _depth
    if threading.get_ident() == threading.main_thread().ident:
        depth = _depth
        try:
            _depth = depth + 1
            if not depth:
                _begin()
        except BaseException:  # Ctrl-C, before it was told to wait
            _depth = depth
            raise


def release() -> None:
    """The end of a `hold`. KeyboardInterrupt where it was the outermost and Ctrl-C came meanwhile."""
    global _depth
    if threading.get_ident() == threading.main_thread().ident:
        _depth = max(0, _depth - 1)
        if not _depth:
            _end()


class held:
    """A block at whose end, and nowhere in which, Ctrl-C interrupts."""

    def __enter__(self) -> None:
        hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release()


class allowed:
    """A block within `held` in which Ctrl-C interrupts at once, also where it came before."""

    _depth = 0

    def __enter__(self) -> None:
        global _depth
        if _depth and threading.get_ident() == threading.main_thread().ident:
            self._depth, _depth = _depth, 0
            try:
                _end()
            except BaseException:
                self.__exit__(None, None, None)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _depth
        if self._depth:
            _depth = self._depth
            _begin()


def _begin() -> None:
    global _handler, _came
    handler = _handler_of(signal.SIGINT)
    if (
        callable(handler) and handler is not _note
    ):  # else the system's default, which ends the process, or it is ignored
        _handler, _came = handler, False
        _set_handler(signal.SIGINT, _note)


def _end() -> None:
    global _came
    if _handler_of(signal.SIGINT) is _note:
        _set_handler(signal.SIGINT, _handler)
    if _came:
        _came = False
        _handler(signal.SIGINT, sys._getframe())


def _note(number: int, frame: FrameType | None) -> None:
    global _came
    _came = True
