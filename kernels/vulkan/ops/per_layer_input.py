"""Binding of per_layer_input."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops._linear import GEMV_TOKENS, linear
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

OUTS, TYPES = 32, ("q8_0", "q4_0")  # of own_gate.slang: outputs of a workgroup, types of weights that it is built for


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,H] = h @ w_proj [H,P].T, h [T,P] = gelu_tanh(x @ w_gate [P,H].T) * the layer's columns of ple f32 [T,E]: h in one
    dispatch for few rows with int8 activations, in two for others."""
    w, few = t["w_gate"], step.bind["T"] <= GEMV_TOKENS and t["x"].dtype == t["h"].dtype == "q8_act"
    if few and len(w.chunks) == 1 and w.dtype in TYPES:
        _own_gate(rec, step, t)
    else:
        _product_and_gate(rec, step, t)
    linear(rec, t["h"], t["w_proj"], t["y"].parts[0], rows=step.bind["T"], extent=step.extent)


def _own_gate(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    bind, device, w = step.bind, rec.device, t["w_gate"].chunks[0]
    threads = min(OUTS * device.subgroup_size, device.max_threads)
    kernel = rec.kernel(f"own_gate.{w.dtype}.q8_act", SUBGROUP=device.subgroup_size, THREADS=threads)
    push = struct.pack("<6I", CONTROL[step.extent], bind["T"], bind["P"], bind["H"], bind["E"],
                       int(step.attrs["layer"]) * bind["P"])
    reads = [*t["x"].parts, *w.parts, *t["ple"].parts]
    rec.dispatch(kernel, reads, t["h"].parts, push, grid=(bind["P"] // OUTS, 1, 1))


def _product_and_gate(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    rows, width, h = step.bind["T"], step.bind["P"], t["h"]
    gate = rec.scratch(4 * rows * width)
    linear(rec, t["x"], t["w_gate"], gate, rows=rows, extent=step.extent)
    push = struct.pack("<5I", CONTROL[step.extent], rows, width // 4, step.bind["E"] // 4, int(step.attrs["layer"]) * width // 4)
    rec.dispatch(rec.kernel(f"per_layer_gate.{h.dtype}"), reads=[gate, *t["ple"].parts], writes=h.parts, push=push,
                 grid=(-(-width // 256), Live(step.extent, cap=rows), 1))
