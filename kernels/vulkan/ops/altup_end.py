"""Binding of altup_end: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import record_rows
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y [T,H] = rms(mean) * w_norm; mean: of stream 0 and z f32 [T,(A-1)*H] scaled to stream 0's magnitude."""
    reads = ("streams", "z", "w_norm")
    record_rows(rec, step, t, reads, writes=("y",))
