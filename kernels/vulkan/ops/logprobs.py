"""logprobs: one workgroup for each part of an output row, then one workgroup per row that merges its parts."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

PART, MOST = 2048, 20  # as in the shader: ids of a part, and most top ids of a row
READS = ("logits", "out_rows", "slots", "positions", "params")


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """top_ids, top_logprobs [S,64,21] from logits[O,V] and the sampled tokens of history [S,C]; ids >= valid have no
    probability."""
    outs, vocab = t["logits"].shape
    slots, context = t["history"].shape
    valid = int(step.attrs["valid"])
    if not 0 < valid <= vocab:
        raise VulkanError(f"step {step.name}: valid must be 1..{vocab} (the rows of the vocabulary), not {valid}")
    parts, subgroup = -(-valid // PART), rec.device.subgroup_size
    push = struct.pack("<7I", outs, t["slots"].shape[0], slots, vocab, valid, context, parts)
    found, masses = rec.scratch(8 * MOST * outs * parts), rec.scratch(4 * outs * parts)
    reads = [p for name in READS for p in t[name].parts]
    live = Live("outs", cap=outs)
    rec.dispatch(rec.kernel("logprobs_parts", SUBGROUP=subgroup), reads, [found, masses], push, (parts, live))
    writes = [*t["top_ids"].parts, *t["top_logprobs"].parts]
    merge = rec.kernel("logprobs", SUBGROUP=subgroup)
    rec.dispatch(merge, [*reads, found, masses, *t["history"].parts], writes, push, (live,))
