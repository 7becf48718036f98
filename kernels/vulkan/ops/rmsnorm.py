"""rmsnorm: one workgroup per row."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

WORKGROUPS = ((64, 1024), (256, 2048), (1024, 1 << 31))  # threads, and the largest hidden size that takes so many


def workgroup(hidden: int, most: int) -> int:
    """Threads for a row: a row that two sweeps hold in registers where the device allows that many."""
    return next(threads for i, (threads, width) in enumerate(WORKGROUPS)
                if hidden <= width or WORKGROUPS[i + 1][0] > most)


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y[T,H] = x / sqrt(mean(x^2) + eps) * w, for the live rows; y f32, f16 or q8_act."""
    rows, hidden = step.bind["T"], step.bind["H"]
    y = t["y"]
    kernel = rec.kernel(f"rmsnorm.{y.dtype}.{workgroup(hidden, rec.device.max_threads)}", SUBGROUP=rec.device.subgroup_size)
    push = struct.pack("<3If", CONTROL[step.extent], rows, hidden // 4, step.attrs["eps"])
    rec.dispatch(kernel, [*t["x"].parts, *t["w"].parts], [*y.parts], push, (Live(step.extent, cap=rows),))
