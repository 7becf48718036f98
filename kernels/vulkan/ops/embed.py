"""Binding of embed."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._gemm import unit
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """x f32 [T,H] = w[token] * scale: one dispatch per chunk of w. An id outside the vocabulary reads the nearest
    row."""
    w, rows = t["w"], step.bind["T"]
    vocab, hidden = w.shape
    units = hidden // unit(w.dtype)
    for chunk in w.chunks:
        push = struct.pack("<5If", hidden, chunk.row, chunk.rows, vocab, rows, float(step.attrs["scale"]))
        rec.dispatch(
            rec.kernel(f"embed.{w.dtype}"),
            reads=[t["tokens"].parts[0], *chunk.parts],
            writes=[t["x"].parts[0]],
            push=push,
            grid=(-(-units // 64), Live("rows", cap=rows), 1),
        )
