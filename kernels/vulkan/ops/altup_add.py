"""Binding of altup_add: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import record_rows
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """streams f32 [T,A*H] = corrected, with rms(a) * w_post added to all but stream 0."""
    reads = ("corrected", "a", "w_post")
    record_rows(rec, step, t, reads, writes=("streams",))
