"""Binding of add_norm: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import Parts, record_sum
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], parts: Parts | None = None) -> None:
    """sum f32 [T,H] = residual + rms(a) * w_post, also stored as y [T,H]. `parts`: partials of a; a is then written."""
    reads = ("a", "residual", "w_post")
    record_sum(rec, step, t, reads, writes=("sum", "y"), parts=parts)
