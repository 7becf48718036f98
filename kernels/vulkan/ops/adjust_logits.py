"""adjust_logits: penalties, biases and masks; a workgroup for each tile of ids of each output row."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

TILE = 1024  # ids of a workgroup, as in the shader
READS = ("logits", "out_rows", "slots", "positions", "penalties", "history", "bias_ids", "bias", "mask_rows", "masks")


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """adjusted[O,V] from logits[O,V] by penalties, history [S,..], bias_ids, bias [S,N] and masks [M, ceil(V/32)]."""
    outs, vocab = t["logits"].shape
    slots, context = t["history"].shape
    push = struct.pack("<7I", outs, t["slots"].shape[0], slots, vocab, context, t["bias"].shape[1], t["masks"].shape[0])
    kernel = rec.kernel("adjust_logits", SUBGROUP=rec.device.subgroup_size)
    reads = [p for name in READS for p in t[name].parts]
    rec.dispatch(kernel, reads, t["adjusted"].parts, push, (-(-vocab // TILE), Live("outs", cap=outs)))
