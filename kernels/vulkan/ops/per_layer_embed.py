"""Binding of per_layer_embed."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """ple f32 [T,E] of the tokens' rows of w [V,E] and of context f32 [T,E]: one dispatch per chunk of w."""
    w, rows, bind, attrs = t["w"], step.bind["T"], step.bind, step.attrs
    for chunk in w.chunks:
        push = struct.pack(
            "<7I3f",
            CONTROL[step.extent],
            rows,
            bind["E"],
            bind["P"],
            chunk.row,
            chunk.rows,
            bind["V"],
            attrs["scale"],
            attrs["context_scale"],
            attrs["eps"],
        )
        kernel = rec.kernel(f"per_layer_embed.{w.dtype}", SUBGROUP=rec.device.subgroup_size)
        reads = [t["tokens"].parts[0], *chunk.parts, t["context"].parts[0], t["w_norm"].parts[0]]
        rec.dispatch(
            kernel,
            reads=reads,
            writes=t["ple"].parts,
            push=push,
            grid=(bind["E"] // bind["P"], Live(step.extent, cap=rows), 1),
        )
