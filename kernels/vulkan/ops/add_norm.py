"""Binding of add_norm: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import record_rows
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """sum f32 [T,H] = residual + rms(a) * w_post, and again as y [T,H]."""
    reads = ("a", "residual", "w_post")
    record_rows(rec, step, t, reads, writes=("sum", "y"))
