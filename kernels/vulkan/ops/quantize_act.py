"""Binding of quantize_act."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y [T,K], q8_act or f16, = x f32 [T,K]."""
    rows, k = step.bind["T"], step.bind["K"]
    rec.dispatch(
        rec.kernel(f"quantize_act.{t['y'].dtype}"),
        reads=[t["x"].parts[0]],
        writes=t["y"].parts,
        push=struct.pack("<3I", CONTROL[step.extent], rows, k),
        grid=(-(-k // 256), Live(step.extent, cap=rows), 1),
    )
