"""Binding of dequantize."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.spec.plan import Step
from kernels.vulkan.ops._linear import unit, wide
from kernels.vulkan.recorder import Recorder
from kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 or f16 [N,K] = the numbers of w: one dispatch per chunk of w."""
    w, y = t["w"], t["y"]
    per_row = w.shape[-1] // unit(w.dtype)
    for chunk in w.chunks:
        units = chunk.rows * per_row
        x, z = wide(-(-units // 64))
        rec.dispatch(rec.kernel(f"dequantize.{w.dtype}.{y.dtype}"), reads=chunk.parts, writes=y.parts,
                     push=struct.pack("<2I", chunk.row * per_row, units), grid=(x, 1, z))
