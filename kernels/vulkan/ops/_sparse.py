"""Recording products of sparse feed-forwards: unneeded rows of up and columns of down are not read."""

from __future__ import annotations

import struct
from statistics import NormalDist

from hybrid.core.plan import CONTROL
from hybrid.kernels.vulkan import columns
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.ops._linear import linear, tokens
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor, cut

DOWN_OUTS = 64  # rows of down per workgroup of sparse_down.slang


def sparse_up(
    rec: Recorder, x: DeviceTensor, w: Chunk, h: DeviceTensor, *, rows: int, extent: str, sparsity: float
) -> None:
    """h [rows, F] = sparse `geglu` of x @ w.T, for at most GEMV_TOKENS rows and one unsplit weight [2F, K]. The product
    with gate comes first, then that with the needed rows of up. h has the activation type of x."""
    f, k = w.rows // 2, x.shape[-1]
    gate = rec.scratch(4 * rows * f)
    only_gate = DeviceTensor("gate", w.dtype, (f, k), (cut(w, 0, f, k),))
    linear(rec, x, only_gate, gate, rows=rows, extent=extent)
    push = struct.pack("<4If", CONTROL[extent], rows, f, k, NormalDist().inv_cdf(sparsity))
    kernel = rec.kernel(f"sparse_up.{w.dtype}.{x.dtype}", SUBGROUP=rec.device.subgroup_size)
    rec.dispatch(kernel, reads=[*x.parts, *w.parts, gate], writes=h.parts, push=push, grid=(f // 32, 1, 1))


def sparse_columns(rec: Recorder, h: DeviceTensor, w: DeviceTensor, *, rows: int) -> DeviceTensor | None:
    """w_down [H, F] by columns, if the tuning table asks for it for so many rows and the kernel has the types of h and
    w; else None."""
    if h.dtype != "q8_act" or not columns.fits(w):
        return None
    return rec.device.by_columns(w) if rows <= columns.most_rows(rec.device.tuning, w.dtype, w.shape) else None


def sparse_down(rec: Recorder, h: DeviceTensor, w: DeviceTensor, y: Slice, *, rows: int, extent: str) -> None:
    """y f32 [rows, H] = h @ w.T, for at most GEMV_TOKENS rows of h q8_act and w [H, F] by columns."""
    n, f = w.shape
    push = struct.pack("<4I", CONTROL[extent], rows, f, n)
    rec.dispatch(
        rec.kernel(f"sparse_down.{w.dtype}", TOKENS=tokens(rows)),
        reads=[*h.parts, *w.parts],
        writes=[y],
        push=push,
        grid=(-(-n // DOWN_OUTS), 1, 1),
    )
