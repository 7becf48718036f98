"""Binding of take_routes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """wanted_positions, wanted_slots, wanted_rows i32 [O] of the live outputs."""
    outs = step.bind["O"]
    rec.dispatch(
        rec.kernel("take_routes"),
        reads=[t[n].parts[0] for n in ("all_positions", "all_slots", "out_rows")],
        writes=[t[n].parts[0] for n in ("wanted_positions", "wanted_slots", "wanted_rows")],
        push=struct.pack("<2I", outs, step.bind["R"]),
        grid=(Live("outs", per=64, cap=outs),),
    )
