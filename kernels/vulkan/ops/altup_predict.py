"""Binding of altup_predict: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import record_rows
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """predicted f32 [T,A*H], and normed f32 and y [T,H] = rms(predicted 0) * w_norm, of streams f32 [T,A*H]."""
    reads = ("streams", "w_router_norm", "w_router", "w_predict", "w_norm")
    record_rows(rec, step, t, reads, writes=("predicted", "normed", "y"))
