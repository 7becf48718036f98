"""Progress of long work on standard error: a bar on a terminal, otherwise occasional log lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hybrid.core.units import show_count

T = TypeVar("T")
FIRST, EVERY = 10.0, 30.0
"""Seconds before the first log line, and between lines."""


class Advance:
    """Called with an amount, advances a progress; `name` says what is done now."""

    def __init__(self, advance: Callable[[int], object], name: Callable[[str], object]) -> None:
        self._advance, self.name = advance, name

    def __call__(self, amount: int = 1) -> None:
        self._advance(amount)


@contextmanager
def progress_bar(total: int, name: str, wanted: bool, unit: str, after: float = 0.0) -> Iterator[Advance]:
    """Yields a function that advances the progress towards `total`. The bar (on a terminal, or if `wanted`) appears
    after `after` seconds."""
    if not wanted and not sys.stderr.isatty():
        with plain_lines(total, name, unit) as advance:
            yield advance
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, unit_scale=True, desc=name, delay=after) as bar:
        yield Advance(bar.update, bar.set_description_str)


def tracked(items: Sequence[T], name: str) -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with progress_bar(len(items), name, False, "", after=1.0) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def plain_lines(total: int, name: str, unit: str) -> Iterator[Advance]:
    """Log lines such as `tests: 3 of 12, 40 s`, printed by a thread, so that long steps also report."""
    done, names, begin, ended = [0], [name], time.monotonic(), threading.Event()

    def advance(amount: int) -> None:
        done[0] += amount

    def say() -> None:
        wait = FIRST
        while not ended.wait(wait):
            spent = time.monotonic() - begin
            much = f"{show_count(done[0])} of {show_count(total)} {unit}".rstrip()
            print(f"{names[-1]}: {much}, {spent:.0f} s", file=sys.stderr, flush=True)
            wait = EVERY

    thread: Any = threading.Thread(target=say, name="progress", daemon=True)
    thread.start()
    try:
        yield Advance(advance, names.append)
    finally:
        ended.set()
        thread.join()
