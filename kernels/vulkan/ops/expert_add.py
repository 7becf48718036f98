"""Binding of expert_add."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

READS = ("a", "o", "places", "gates", "residual", "w_dense", "w_experts", "w_post", "w_next")


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """sum f32 [T,H] and y [T,H] of the live rows; y f32, f16 or q8_act."""
    rows, attrs = step.bind["T"], step.attrs
    sizes = row_sizes(step.bind["H"], rec.device.subgroup_size, rec.device.max_threads)
    rec.dispatch(
        rec.kernel(f"expert_add.{t['y'].dtype}", **sizes),
        reads=[p for name in READS for p in t[name].parts],
        writes=[*t["sum"].parts, *t["y"].parts],
        push=struct.pack("<2I2fI", CONTROL[step.extent], rows, attrs["eps"], attrs["scale"], step.bind["K"]),
        grid=(Live(step.extent, cap=rows),),
    )
