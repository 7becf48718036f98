"""Binding of fused_ffn."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._linear import GEMV_TOKENS, ffn_up, geglu, linear
from hybrid.kernels.vulkan.ops._sparse import sparse_columns, sparse_down, sparse_up
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], partials: int = 0) -> None:
    """y f32 [T,H] = down(h), h [T,F] = gelu_tanh(gate(x)) * up(x) in the step's scratch tensor.

    With sparsity and few rows, gate's product comes first, and only the rows of up with an open gate are read. Where
    the tuning table asks for it, only the columns of down with a nonzero h are read, from a column-major copy.

    Two dispatches where gate and up are in one chunk, h has the activation type of x and all gates count. Otherwise
    gate and up go through a temporary f32 [T,2F]. `partials`: y is f32 [partials*T,H] of kept partials (linear()).
    """
    x, w, h, rows = t["x"], t["w_gate_up"], t["h"], step.bind["T"]
    sparsity = float(step.attrs.get("sparsity", 0.0))
    if len(w.chunks) == 1 and x.dtype == h.dtype and not sparsity:
        ffn_up(rec, x, w.chunks[0], h, rows=rows, extent=step.extent)
    elif sparsity and rows <= GEMV_TOKENS and len(w.chunks) == 1 and x.dtype == h.dtype:
        sparse_up(rec, x, w.chunks[0], h, rows=rows, extent=step.extent, sparsity=sparsity)
    else:
        gate_up = rec.scratch(4 * rows * w.shape[0])
        linear(rec, x, w, gate_up, rows=rows, extent=step.extent)
        geglu(rec, gate_up, h, rows=rows, extent=step.extent, sparsity=sparsity)
    if sparsity and not partials and (down := sparse_columns(rec, h, t["w_down"], rows=rows)):
        sparse_down(rec, h, down, t["y"].parts[0], rows=rows, extent=step.extent)
    else:
        linear(rec, h, t["w_down"], t["y"].parts[0], rows=rows, extent=step.extent, partials=partials)
