"""Binding of per_layer_input."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops._gemm import TILES, goes_to_registers, split_threads, tile_for
from hybrid.kernels.vulkan.ops._linear import GEMV_TOKENS, linear
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor
from hybrid.kernels.vulkan.types import SCALED

OUTS = 32  # outputs of a workgroup of own_gate.slang
TILE = "8x16"  # of gemm_n8_split_k.slang


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,H] = h @ w_proj [H,P].T, h [T,P] = gelu_tanh(x @ w_gate [P,H].T) * the layer's columns of ple f32 [T,E].
    h takes one dispatch for few rows with int8 activations or on matrix units, else two."""
    w, few, types = t["w_gate"], step.bind["T"] <= GEMV_TOKENS, (t["x"].dtype, t["h"].dtype)
    alone = len(w.chunks) == 1
    if few and alone and types == ("q8_act", "q8_act") and w.dtype in SCALED:
        _own_gate(rec, step, t)
    elif not few and alone and types == ("f16", "f16") and _on_matrix_units(rec, step, w.dtype):
        _gate_on_matrix_units(rec, step, t)
    else:
        _product_and_gate(rec, step, t)
    linear(rec, t["h"], t["w_proj"], t["y"].parts[0], rows=step.bind["T"], extent=step.extent)


def _own_gate(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    bind, device, w = step.bind, rec.device, t["w_gate"].chunks[0]
    threads = min(OUTS * device.subgroup_size, device.max_threads)
    kernel = rec.kernel(f"own_gate.{w.dtype}.q8_act", SUBGROUP=device.subgroup_size, THREADS=threads)
    push = struct.pack(
        "<6I", CONTROL[step.extent], bind["T"], bind["P"], bind["H"], bind["E"], int(step.attrs["layer"]) * bind["P"]
    )
    reads = [*t["x"].parts, *w.parts, *t["ple"].parts]
    rec.dispatch(kernel, reads, t["h"].parts, push, grid=(bind["P"] // OUTS, 1, 1))


def _on_matrix_units(rec: Recorder, step: Step, dtype: str) -> bool:
    """Whether gemm_n8_split_k.slang computes the product with the gate and the tuning table asks for it."""
    rows, width, k = step.bind["T"], step.bind["P"], step.bind["H"]
    asked = tile_for(rec.device, "linear", dtype, rows, width, k)["tile"]
    return asked == TILE and goes_to_registers(rec.device, "linear", TILE, dtype, k)


def _gate_on_matrix_units(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    bind, w = step.bind, t["w_gate"].chunks[0]
    kernel = rec.kernel(f"own_gate.{w.dtype}.f16", THREADS=split_threads(rec.device, TILE, bind["H"]), K=bind["H"])
    rows, first = bind["T"], int(step.attrs["layer"]) * bind["P"]
    push = struct.pack("<7If", bind["P"], bind["H"], first, bind["E"], CONTROL[step.extent], rows, rows, 0.0)
    tall, across = TILES[TILE]
    rec.dispatch(
        kernel,
        [*t["x"].parts, *w.parts, *t["ple"].parts],
        t["h"].parts,
        push,
        grid=(Live(step.extent, per=tall, cap=rows), -(-bind["P"] // across), 1),
    )


def _product_and_gate(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    rows, width, h = step.bind["T"], step.bind["P"], t["h"]
    gate = rec.scratch(4 * rows * width)
    linear(rec, t["x"], t["w_gate"], gate, rows=rows, extent=step.extent)
    push = struct.pack(
        "<5I", CONTROL[step.extent], rows, width // 4, step.bind["E"] // 4, int(step.attrs["layer"]) * width // 4
    )
    rec.dispatch(
        rec.kernel(f"per_layer_gate.{h.dtype}"),
        reads=[gate, *t["ple"].parts],
        writes=h.parts,
        push=push,
        grid=(-(-width // 256), Live(step.extent, cap=rows), 1),
    )
