"""decode_rows: tokens and positions of the rows from their slots' next ones, and the context length into control."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """tokens[T], positions[T] = next_token, next_position of slots[T]; control's context = longest position + 1."""
    rows, slots = t["slots"].shape[0], t["next_token"].shape[0]
    kernel = rec.kernel("decode_rows", SUBGROUP=rec.device.subgroup_size)
    reads = [p for name in ("slots", "next_token", "next_position") for p in t[name].parts]
    writes = [*t["tokens"].parts, *t["positions"].parts, rec.control]
    rec.dispatch(kernel, reads, writes, struct.pack("<II", rows, slots))
