"""Binding of linear_rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.ops._gemm import unit, wide
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor

# As in the shader: rows of x and of w in a workgroup's tile.
TOKENS, ACROSS = 8, 128
CODES = 64 << 20  # bytes of a weight's codes at a time


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,N] = x f32 [T,K] @ w [N,K].T through int8 codes with one scale per row of x and w; w in bands of
    rows."""
    x, w, rows, k = t["x"], t["w"], step.bind["T"], step.bind["K"]
    band = max(1, min(CODES, rec.device.max_range) // k)
    (left,) = x.chunks
    x_codes, x_scale = rec.scratch(rows * k), rec.scratch(4 * rows)
    most = min(band, max(c.rows for c in w.chunks))
    codes, scale = rec.scratch(most * k), rec.scratch(4 * most)
    _quantise(rec, left, 0, rows, k, (x_codes, x_scale), tokens=True)
    kernel = rec.kernel("linear_rows")
    for chunk in w.chunks:
        for first in range(0, chunk.rows, band):
            n = min(band, chunk.rows - first)
            _quantise(rec, chunk, first, n, k, (codes, scale), tokens=False)
            rec.dispatch(
                kernel,
                reads=[x_codes, x_scale, codes, scale],
                writes=t["y"].parts,
                push=struct.pack("<5I", n, k, chunk.row + first, w.shape[0], rows),
                grid=(-(-n // ACROSS), Live("rows", per=TOKENS, cap=rows)),
            )


def _quantise(
    rec: Recorder, chunk: Chunk, first: int, rows: int, k: int, to: tuple[Slice, Slice], *, tokens: bool
) -> None:
    x, z = wide(rows)
    push = struct.pack("<4I", first, rows, k // unit(chunk.dtype), tokens)
    rec.dispatch(
        rec.kernel(f"quantize_rows.{chunk.dtype}", SUBGROUP=rec.device.subgroup_size),
        reads=chunk.parts,
        writes=to,
        push=push,
        grid=(x, 1, z),
    )
