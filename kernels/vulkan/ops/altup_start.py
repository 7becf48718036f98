"""Binding of altup_start: one workgroup per row."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._rows import record_rows
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """streams f32 [T,A*H]: x f32 [T,H], then z f32 [T,(A-1)*H] at x's magnitude."""
    reads = ("x", "z")
    record_rows(rec, step, t, reads, writes=("streams",))
