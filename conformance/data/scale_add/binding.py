"""Binding of scale_add."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,H] = a*x + b of x f32 [T,H], for the live rows."""
    rows, h = step.bind["T"], step.bind["H"]
    push = struct.pack("<3I2f", CONTROL[step.extent], rows, h, step.attrs["a"], step.attrs["b"])
    grid = (-(-h // 256), Live(step.extent, cap=rows), 1)
    rec.dispatch(rec.kernel("scale_add"), t["x"].parts, t["y"].parts, push, grid)
