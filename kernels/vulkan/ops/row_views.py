"""Binding of row_views."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """sees i32 [T]: the last position that each row sees."""
    rows = step.bind["T"]
    rec.dispatch(
        rec.kernel("row_views"),
        reads=[t[n].parts[0] for n in ("positions", "slots", "span_last")],
        writes=[t["sees"].parts[0]],
        push=struct.pack("<4I", CONTROL[step.extent], rows, step.bind["S"], step.bind["C"]),
        grid=(Live(step.extent, per=64, cap=rows),),
    )
