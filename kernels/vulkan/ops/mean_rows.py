"""Binding of mean_rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [O,W]: means of ranges of x's rows, for the live outputs."""
    outs, fours = step.bind["O"], step.bind["W"] // 4
    rec.dispatch(
        rec.kernel("mean_rows"),
        reads=[*t["x"].parts, *t["ranges"].parts],
        writes=t["y"].parts,
        push=struct.pack("<3I", outs, step.bind["R"], fours),
        grid=(-(-fours // 64), Live("outs", cap=outs), 1),
    )
