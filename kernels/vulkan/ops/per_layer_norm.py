"""Binding of per_layer_norm."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """ple f32 [T,E] of context f32 [T,E], normed by layer, for the live rows."""
    rows, width = step.bind["T"], step.bind["P"]
    layers = step.bind["E"] // width
    scale, eps = step.attrs["context_scale"], step.attrs["eps"]
    rec.dispatch(
        rec.kernel("per_layer_norm", SUBGROUP=rec.device.subgroup_size),
        reads=[*t["context"].parts, *t["w_norm"].parts],
        writes=t["ple"].parts,
        push=struct.pack("<4I2f", CONTROL[step.extent], rows, layers, width // 4, scale, eps),
        grid=(layers, Live(step.extent, cap=rows), 1),
    )
