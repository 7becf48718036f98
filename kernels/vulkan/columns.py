"""Column-major copies of weights (columns.slang), for products that read few columns (sparse_down.slang).

A copy has the weight's size and is stored beside it. One dispatch makes it when the first plan that reads it is
compiled.
"""

from __future__ import annotations

import struct
from typing import Any

from hybrid.core.dtypes import DTYPES
from hybrid.core.plan import Plan, Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor
from hybrid.kernels.vulkan.tuning import Tuning
from hybrid.kernels.vulkan.types import SCALED
from hybrid.spec.cost import Cost

SUFFIX = " by columns"
WIDE, WORDS_OF_GROUP = 32768, 256  # as in columns.slang
_CODES_OF_WORD = {"q8_0": 4, "q4_0": 8}


def most_rows(tuning: Tuning, dtype: str, shape: tuple[int, ...]) -> int:
    """Most rows of a pass for which this device class reads a sparse feed-forward's down matrix [H, F] by columns; 0:
    never."""
    n, f = shape
    return tuning.choose("sparse_down", {"most": 0}, w=dtype, n=n, k=f)["most"] if dtype in SCALED else 0


def second_layout(tuning: Tuning, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of the column-major copy; 0 where none is made."""
    return DTYPES[dtype].nbytes(shape) if most_rows(tuning, dtype, shape) else 0


def fits(w: DeviceTensor) -> bool:
    """Whether a weight [H, F] can be stored by columns: its type has the kernel, and it is one chunk."""
    return w.dtype in SCALED and len(w.chunks) == 1


def lay_out(device: Any, w: DeviceTensor, by_columns: DeviceTensor) -> None:
    """Fill `by_columns` from `w`; returns when the copy is complete."""
    n, f = w.shape
    groups = -(-n * f // _CODES_OF_WORD[w.dtype] // WORDS_OF_GROUP)
    recorder = Recorder(device, w.parts[0])
    grid = min(groups, WIDE), 1, -(-groups // WIDE)
    push = struct.pack("<2I", f, n)
    recorder.dispatch(device.kernel(f"columns.{w.dtype}"), reads=w.parts, writes=by_columns.parts, push=push, grid=grid)
    plan = Plan("columns", 1, 0, (Step("columns", "columns", {}, {}),), {})
    program = device.program_type(device, plan, recorder, False, cost=Cost(nbytes=2 * sum(p.size for p in w.parts)))
    try:
        device.wait(program.submit())
    finally:
        program.close()
