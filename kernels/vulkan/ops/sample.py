"""sample: the next token of each output row, one workgroup per row. For long rows, many workgroups first find the
greatest logit and the best draw."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

# Largest vocabulary for 256 threads; larger ones take 1024 where allowed. llvmpipe silently ends every loop after 65535
# iterations in all, which 256 threads exceed over a million ids.
SMALL_VOCAB = 16384
PART = 2048  # ids of a part of a long row: 256 threads of sample_best.slang, 8 ids each


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """next_token, next_position [S] and history [S,C] from logits[O,V]; ids >= valid are never sampled."""
    outs, vocab = t["logits"].shape
    valid = int(step.attrs["valid"])
    if not 0 < valid <= vocab:
        raise VulkanError(f"step {step.name}: valid must be 1..{vocab} (the rows of the vocabulary), not {valid}")
    subgroup = rec.device.subgroup_size
    threads = (
        1024 if vocab > SMALL_VOCAB else rec.device.tuning.choose("sample", {"threads": 256}, vocab=vocab)["threads"]
    )
    threads = min(threads, 1024 if rec.device.max_threads >= 1024 else 256)
    parts = -(-valid // PART) if vocab > SMALL_VOCAB else 0
    found = t["logits"].parts[0]  # not read without parts, but its binding needs some buffer
    slots, context = t["history"].shape
    reads = [p for name in ("logits", "out_rows", "slots", "positions", "params") for p in t[name].parts]
    if parts:
        found = rec.scratch(16 * outs * parts)
        push = struct.pack("<6I", outs, vocab, valid, parts, t["slots"].shape[0], slots)
        rec.dispatch(
            rec.kernel("sample_best", SUBGROUP=subgroup), reads, [found], push, (parts, Live("outs", cap=outs))
        )
    kernel = rec.kernel(f"sample.{threads}", SUBGROUP=subgroup)
    push = struct.pack("<7I", outs, t["slots"].shape[0], slots, vocab, valid, context, parts)
    writes = [p for name in ("next_token", "next_position", "history") for p in t[name].parts]
    rec.dispatch(kernel, [*reads, found], writes, push, (Live("outs", cap=outs),))
