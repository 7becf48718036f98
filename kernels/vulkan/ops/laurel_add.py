"""Binding of laurel_add: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import Parts, record_sum
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], parts: Parts | None = None) -> None:
    """sum f32 [T,H] of stream 0, attention and LAuReL, and y [T,H] = rms(sum) * w_next. `parts`: partials of a; a is
    then written."""
    reads = ("a", "laurel", "predicted", "normed", "w_post", "w_laurel", "w_next")
    record_sum(rec, step, t, reads, writes=("sum", "y"), parts=parts)
