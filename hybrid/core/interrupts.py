"""Defer KeyboardInterrupt in critical sections of the main thread.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a block that holds a lock, or must
not stop halfway, it is deferred to the end of the block:

    with interrupts.held():
        ...
        with interrupts.allowed():  # long work that is safe to interrupt anywhere
            ...

Only SIGINT is deferred, with its current handler. In other threads both are no-ops: Python never interrupts them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# The C module under `signal`: avoids its slow conversions to enumerations.
_set_handler, _handler_of = _signal.signal, _signal.getsignal

_depth = 0  # nested `held` blocks of the main thread
_came = False  # whether SIGINT arrived within them
_handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler  # the handler outside of them


def begin() -> bool:
    """Let Ctrl-C raise KeyboardInterrupt again: while a command's modules load it ends the process (hybrid/__init__.py).
    Returns whether this process is such a command."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    alone = getattr(_handler_of(signal.SIGINT), "__module__", None) == "hybrid"
    if alone:
        _set_handler(signal.SIGINT, signal.default_int_handler)
    return alone


def hold() -> None:
    """Defer SIGINT until `release`, which another function may call."""
    global _depth
    if threading.get_ident() == threading.main_thread().ident:
        depth = _depth
        try:
            _depth = depth + 1
            if not depth:
                _begin()
        except BaseException:  # SIGINT before the handler was replaced
            _depth = depth
            raise


def release() -> None:
    """End a `hold`. Raises KeyboardInterrupt if it was the outermost and SIGINT arrived meanwhile."""
    global _depth
    if threading.get_ident() == threading.main_thread().ident:
        _depth = max(0, _depth - 1)
        if not _depth:
            _end()


class held:
    """Context manager: SIGINT is deferred to the end of the block."""

    def __enter__(self) -> None:
        hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release()


class allowed:
    """Context manager within `held`: SIGINT interrupts at once, also if it is already pending."""

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
    if callable(handler) and handler is not _note:  # otherwise SIG_DFL, which ends the process, or SIG_IGN
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
