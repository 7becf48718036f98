"""Binding of insert_rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,H] = rows[token - first] for ids of rows, else x."""
    count, fours = step.bind["T"], step.bind["H"] // 4
    rec.dispatch(
        rec.kernel("insert_rows"),
        reads=[t[n].parts[0] for n in ("tokens", "x", "rows")],
        writes=[t["y"].parts[0]],
        push=struct.pack("<4Ii", CONTROL[step.extent], count, step.bind["R"], fours, int(step.attrs["first"])),
        grid=(-(-fours // 64), Live(step.extent, cap=count), 1),
    )
