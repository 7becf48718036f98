"""Binding of per_layer_input."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,H] = h @ w_proj [H,P].T, h [T,P] = gelu_tanh(x @ w_gate [P,H].T) * the layer's columns of ple f32 [T,E]."""
    rows, width, h = step.bind["T"], step.bind["P"], t["h"]
    gate = rec.scratch(4 * rows * width)
    linear(rec, t["x"], t["w_gate"], gate, rows=rows, extent=step.extent)
    push = struct.pack("<5I", CONTROL[step.extent], rows, width // 4, step.bind["E"] // 4, int(step.attrs["layer"]) * width // 4)
    rec.dispatch(rec.kernel(f"per_layer_gate.{h.dtype}"), reads=[gate, *t["ple"].parts], writes=h.parts, push=push,
                 grid=(-(-width // 256), Live(step.extent, cap=rows), 1))
    linear(rec, h, t["w_proj"], t["y"].parts[0], rows=rows, extent=step.extent)
