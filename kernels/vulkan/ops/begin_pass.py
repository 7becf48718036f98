"""begin_pass: rows of the next pass from its message or its slots, block-table entries, and control words."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

READS = ("inbox", "next_token", "next_position", "drafts", "known_until")
WRITES = (
    "turn",
    "live",
    "tokens",
    "positions",
    "slots",
    "out_rows",
    "mask_rows",
    "global_table",
    "local_table",
    "history",
)


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """See specs/ops/begin_pass.toml."""
    (rows,), (outs,), (slots, context), (_, table) = (
        t[n].shape for n in ("tokens", "out_rows", "history", "global_table")
    )
    sets = int(step.attrs["sets"])
    kernel = rec.kernel("begin_pass", SUBGROUP=rec.device.subgroup_size)
    reads, writes = ([p for name in names for p in t[name].parts] for names in (READS, WRITES))
    rec.dispatch(
        kernel, reads, writes, struct.pack("<7I", rows, outs, slots, context, table, sets, t["inbox"].shape[0] // sets)
    )
