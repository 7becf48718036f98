"""rmsnorm: one workgroup per row."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.spec.plan import Step
from kernels.vulkan.recorder import Live, Recorder
from kernels.vulkan.tensors import DeviceTensor

NARROW = 1024  # hidden sizes up to this one take the workgroup of 64 threads, larger ones 256


def workgroup(hidden: int) -> int:
    return 64 if hidden <= NARROW else 256


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y[T,H] = x / sqrt(mean(x^2) + eps) * w, for the live rows; y f32, f16 or q8_act."""
    rows, hidden = step.bind["T"], step.bind["H"]
    y = t["y"]
    kernel = rec.kernel(f"rmsnorm.{y.dtype}.{workgroup(hidden)}", SUBGROUP=rec.device.subgroup_size)
    push = struct.pack("<IIff", rows, hidden // 4, hidden, step.attrs["eps"])
    rec.dispatch(kernel, [*t["x"].parts, *t["w"].parts], [*y.parts], push, (Live(step.extent, cap=rows),))
