"""Host time of an NPU run, measured: python -m perf.npu --host.

The operations' own host code (kernels/npu/ops.py, attend.py) with everything but the NPU: operands dealt out into
buffers, what changed found, results taken and scaled. Runs end at once and sync costs nothing, so an NPU's machine
flushes caches on top. One thread, the process's CPU time, the best of a few. The figures in host.toml are what this
command prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from hybrid.kernels.npu.design import DTYPES
from hybrid.kernels.npu.ops import OPS
from hybrid.kernels.npu.resident import Resident, in_pages
from hybrid.kernels.npu.views import KeyViews
from hybrid.kernels.npu.xrt import Job
from hybrid.perf.npu.attention import MODELS as HEADS

FIGURES = Path(__file__).with_name("host.toml")
ROWS = (64, 512)
"""Rows that matrices are measured with; between them the time is taken to be a line."""
CONTEXT = 8192
"""Positions in the cache that attention is measured with."""


class Instant:
    """kernels.npu.ops.Npu with runs of no duration: results are the buffers' old contents."""

    def __init__(self) -> None:
        self.views = KeyViews(in_pages)
        self._buffers: dict[tuple[str, int], np.ndarray] = {}
        self._kept: dict[Any, Resident] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for name, given in job.inputs.items():
                if isinstance(given, Resident):
                    given.flush(None)
                else:
                    self._buffer(job, name)[:] = job.input(name)
            for name in job.outputs:
                job.deliver(name, self._buffer(job, name))

    def _buffer(self, job: Job, name: str) -> np.ndarray:
        array = job.design.argument(name)
        key = (name, array.nbytes)
        if key not in self._buffers:
            self._buffers[key] = np.zeros(array.nbytes, np.uint8)
        return self._buffers[key].view(DTYPES[array.dtype])

    def kept(self, source: np.ndarray, use: Any, make: Callable[[], np.ndarray], nbytes: int) -> Resident:
        """Without the weights: nothing reads them."""
        if use not in self._kept:
            self._kept[use] = in_pages(nbytes)
        return self._kept[use]

    def noted(self, source: np.ndarray, use: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        return np.ones(len(source), np.float32)


def measure(
    parts: dict[str, tuple[tuple[str, int, int], ...]], seconds: float = 0.3
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of CPU time, {model: {part: of each of ROWS}}; for attention of one new row and of the most of
    ROWS."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, list[float]]] = {}
    for model, matrices in parts.items():
        table = found[model] = {}
        for part, k, n in matrices:
            w, npu = np.broadcast_to(np.float32(1), (n, k)), Instant()
            table[part] = [
                _best(lambda x=x, w=w, npu=npu: OPS["linear_rows"](npu, x=x, w=w), seconds)  # type: ignore[misc]
                for x in (rng.standard_normal((rows, k), np.float32) for rows in ROWS)
            ]
        heads, group, d, _ = HEADS[model]
        cache = np.ones((CONTEXT // 32, 32, heads, d), np.float16)
        for op in ("attention", "attention_i8"):
            npu, times = Instant(), list[float]()
            for rows in (1, ROWS[-1]):
                given = {
                    "q": rng.standard_normal((rows, heads * group * d), np.float32),
                    "k_cache": cache,
                    "v_cache": cache.copy(),
                    "block_table": np.arange(len(cache), dtype=np.int32)[None],
                    "slots": np.zeros(rows, np.int32),
                    "positions": np.arange(CONTEXT - rows, CONTEXT, dtype=np.int32),
                    "scale": d**-0.5,
                    "window": 0,
                }
                times.append(_best(lambda g=given, npu=npu, op=op: OPS[op](npu, **g), seconds))  # type: ignore[misc]
            table[op] = times
    return found


def _best(work: Callable[[], Any], seconds: float) -> float:
    work()
    best, until = float("inf"), time.perf_counter() + seconds
    while True:
        begin = time.process_time()
        work()
        best = min(best, 1e3 * (time.process_time() - begin))
        if time.perf_counter() >= until:
            return best


@lru_cache(maxsize=1)
def figures() -> dict[str, Any]:
    return tomli.loads(FIGURES.read_text())


def host_ms(model: str, part: str, rows: int) -> float:
    """Of `rows` new rows, from host.toml."""
    few, many = figures()["ms"][model][part]
    low = 1 if part.startswith("attention") else ROWS[0]
    return max(0.0, float(few + (many - few) * (rows - low) / (ROWS[-1] - low)))


def switch_ms() -> float:
    """Of a run of another fabric than the last."""
    return 1e-3 * float(figures()["switch"]["us"])


def text(found: dict[str, dict[str, list[float]]]) -> str:
    """As host.toml has it."""
    lines = []
    for model, table in found.items():
        lines.append(f"[ms.{model}]")
        lines += [f"{part} = [{few:.1f}, {many:.1f}]" for part, (few, many) in table.items()]
    return "\n".join(lines)
