"""Binding of keep_last."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """kept f32 [S,W]: the last row of each slot of x f32 [T,W], for the live rows."""
    rows, fours = step.bind["T"], step.bind["W"] // 4
    rec.dispatch(
        rec.kernel("keep_last"),
        reads=[p for name in ("x", "positions", "slots", "next_position") for p in t[name].parts],
        writes=t["kept"].parts,
        push=struct.pack("<4I", CONTROL[step.extent], rows, fours, step.bind["S"]),
        grid=(-(-fours // 64), Live(step.extent, cap=rows), 1),
    )
