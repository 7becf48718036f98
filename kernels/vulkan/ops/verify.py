"""verify: compare draft tokens with the sampled tokens, in one workgroup."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

READS = ("out_rows", "tokens", "slots", "positions", "history")
WRITES = ("next_token", "next_position", "accepted")


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """accepted, next_token, next_position [S] from the rows of tokens[T] that out_rows[O] names, and history [S,C]."""
    slots, context = t["history"].shape
    kernel = rec.kernel("verify", SUBGROUP=rec.device.subgroup_size)
    reads, writes = ([p for name in names for p in t[name].parts] for names in (READS, WRITES))
    rec.dispatch(
        kernel, reads, writes, struct.pack("<4I", t["out_rows"].shape[0], t["tokens"].shape[0], slots, context)
    )
