"""AltUp correction and the per-layer input's gate in one dispatch (altup_gate.slang), then the second product."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor
from hybrid.kernels.vulkan.types import SCALED

OPS = ("altup_correct", "per_layer_input")
OUTS, THREADS = 32, 512  # of altup_gate.slang: outputs and threads of a workgroup


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """corrected f32 [1,A*H], y = corrected 0 * w_scale, h [1,P] = gelu_tanh(y @ w_gate.T) * the layer's columns of ple,
    then h @ w_proj.T.

    False where the steps are unconnected, for several rows, types without a module, rows wider than a workgroup
    holds, or results that overwrite inputs which another workgroup may not have read yet."""
    (correct, own), (old, new) = steps, t
    hidden, width, w, device = correct.bind["H"], own.bind["P"], new["w_gate"], rec.device
    follow = (
        correct.args["y"] == own.args["x"] and correct.extent == own.extent and correct.bind["T"] == own.bind["T"] == 1
    )
    fits = hidden <= 4 * THREADS <= 4 * device.max_threads and len(w.chunks) == 1 and w.dtype in SCALED
    if not (follow and fits and {new[n].dtype for n in ("x", "h")} == {"q8_act"} and len(new["ple"].parts) == 1):
        return False
    inputs = [
        p
        for n in ("a", "residual", "w_post", "predicted", "w_router_norm", "w_router", "w_correct", "w_scale")
        for p in old[n].parts
    ]
    made = [*old["corrected"].parts, *old["y"].parts, *new["h"].parts]
    if any(a.overlaps(b) for a in made for b in inputs):
        return False
    kernel = rec.kernel(
        f"altup_gate.{w.dtype}", SUBGROUP=device.subgroup_size, STREAMS=correct.bind["A"], UNITS=hidden // 4
    )
    push = struct.pack("<2I2fI", CONTROL[correct.extent], 1, correct.attrs["eps"], 0.0, int(own.attrs["layer"]) * width)
    rec.dispatch(kernel, [*inputs, *w.chunks[0].parts, *new["ple"].parts], made, push, grid=(width // OUTS, 1, 1))
    linear(rec, new["h"], new["w_proj"], new["y"].parts[0], rows=1, extent=own.extent)
    return True
