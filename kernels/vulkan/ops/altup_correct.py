"""Binding of altup_correct: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import Parts, record_sum
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], parts: Parts | None = None) -> None:
    """corrected f32 [T,A*H], and y [T,H] = corrected 0 * w_scale. `parts`: partials of a; a is then written."""
    reads = ("a", "residual", "w_post", "predicted", "w_router_norm", "w_router", "w_correct", "w_scale")
    record_sum(rec, step, t, reads, writes=("corrected", "y"), parts=parts)
