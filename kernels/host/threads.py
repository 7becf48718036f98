"""Number of BLAS threads of a matrix product.

A split product ends with its slowest thread. Where other programs use the cores, a sleeping thread may be scheduled a
time slice late: products of 0.1 ms took 16 ms on two busy cores. So a product is split only where one thread would need
longer than that delay. The size decides, not a clock, since with several rows the number of threads changes the last
bits (OpenBLAS, Haswell and Zen), and a prompt should reproduce its text. With one row each output is computed by one
thread. There shorter products are split too, until one is late, and again a second later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from threadpoolctl import ThreadpoolController

SPLIT_FROM = 4e-3
"""Seconds on one thread above which a product is split: about a time slice of a busy machine."""
SPLIT_ONE_ROW_FROM = 0.6e-3
"""The same for products of one row, while the processors are free."""
PAUSE = 1.0
"""Seconds without such splits after one that waited for a processor."""
_MACS_PER_SECOND, _BYTES_PER_SECOND = 30e9, 8e9  # of one core of a desktop, float32

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def seconds_alone(rows: int, columns: int, inner: int, size: int = 4) -> float:
    """Estimated time on one thread of [rows, inner] by [columns, inner].T, whose numbers have `size` bytes, in
    seconds."""
    return columns * inner * max(rows / _MACS_PER_SECOND, size / _BYTES_PER_SECOND)


def processors() -> int:
    """Processors available to this process: its affinity, limited by its container's quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        return min(found, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file, or `max`
        return found


class BlasThreads:
    """Around a pass: `use` sets the number of threads for a product; after the pass the process has its own number
    again.

    libraries: BLAS libraries with threadpoolctl's interface (default: those that it finds). Nothing happens where they
    have one thread, or where none is found. `most`: threads of a product that is split.
    """

    def __init__(self, libraries: Sequence[Any] | None = None) -> None:
        if libraries is None:
            libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._before = [(library, library.num_threads or 1) for library in libraries]
        self._set = 0  # the libraries' current number of threads; 0: their own
        had = max((n for _, n in self._before), default=0)
        self.most = min(had, processors())
        self.many = had > 1
        self._alone_until = 0.0
        names = ", ".join(
            dict.fromkeys(f"{library.internal_api} {library.version or ''}".strip() for library in libraries)
        )
        limits = f"{1e3 * SPLIT_FROM:g} ms, of one row {1e3 * SPLIT_ONE_ROW_FROM:g} ms"
        shared = f", 1 for products below {limits}" if self.many else ""
        self.text = f"{self.most or 'not known how many'} of {names or 'BLAS'}{shared}"
        """Text for --stats."""

    def now(self) -> int:
        """Threads of the product that `use` was told of last."""
        return self._set or 1

    def use(self, seconds: float, one_row: bool = False) -> bool:
        """Set the threads for a product of that length on one thread. True: `judge` needs its duration."""
        if not self.many:
            return False
        trial = one_row and SPLIT_ONE_ROW_FROM <= seconds < SPLIT_FROM and time.perf_counter() >= self._alone_until
        wanted = self.most if trial or seconds >= SPLIT_FROM else 1
        if wanted != self._set:
            for library, _ in self._before:
                library.set_num_threads(wanted)
            self._set = wanted
        return trial

    def judge(self, seconds: float, took: float) -> None:
        """Stop splitting one-row products for a while after one that waited for a processor."""
        if took > 2 * seconds + SPLIT_FROM:
            self._alone_until = time.perf_counter() + PAUSE

    def __enter__(self) -> BlasThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._set:
            for library, had in self._before:
                library.set_num_threads(had)
            self._set = 0
