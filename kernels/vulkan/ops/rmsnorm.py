"""rmsnorm: one workgroup per row."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

WORKGROUPS = ((64, 1024), (256, 2048), (1024, 1 << 31))  # threads, and the largest hidden size that takes so many


def workgroup(hidden: int, most: int) -> int:
    """Threads for a row; a row fits in registers for two sweeps where the device allows enough threads."""
    return next(
        threads for i, (threads, width) in enumerate(WORKGROUPS) if hidden <= width or WORKGROUPS[i + 1][0] > most
    )


HELD = 3  # as in held.slang: units of four elements of a thread
LEAST, PREFERRED = (
    64,
    512,
)  # threads of a row: a few share small matrices too (altup_rows.slang); most where those hold all of it


def row_sizes(hidden: int, subgroup: int, most: int) -> dict[str, int]:
    """Constants of a row kernel: as few units per thread as PREFERRED threads allow, more threads where those cannot
    hold the row, and the most where none can."""
    units, step = hidden // 4, max(subgroup, 8)  # quantisation reduces over eight lanes
    each = min(-(-units // min(PREFERRED, most)), HELD)
    return {"SUBGROUP": subgroup, "WG": min(max(-(-units // (each * step)) * step, LEAST), most), "UNITS": units}


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y[T,H] = x / sqrt(mean(x^2) + eps) * w, for the live rows; y f32, f16 or q8_act."""
    rows, hidden = step.bind["T"], step.bind["H"]
    y = t["y"]
    kernel = rec.kernel(f"rmsnorm.{y.dtype}", **row_sizes(hidden, rec.device.subgroup_size, rec.device.max_threads))
    push = struct.pack("<2If", CONTROL[step.extent], rows, step.attrs["eps"])
    rec.dispatch(kernel, [*t["x"].parts, *t["w"].parts], [*y.parts], push, (Live(step.extent, cap=rows),))
