"""Binding of cluster_logits."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

THREADS, TOKENS = 128, 4


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """picked f32 [O,K*M] of x f32 [R,H] and rows of w [V,H], for the live outputs: one dispatch per chunk of w."""
    w, outs, rows = t["w"], step.bind["O"], step.bind["R"]
    vocab, hidden = w.shape
    members, chosen = step.bind["M"], step.bind["K"]
    each = THREADS // rec.device.subgroup_size * TOKENS
    for chunk in w.chunks:
        rec.dispatch(
            rec.kernel(f"cluster_logits.{w.dtype}", SUBGROUP=rec.device.subgroup_size),
            reads=[*(t[name].parts[0] for name in ("x", "members", "clusters", "out_rows")), *chunk.parts],
            writes=t["picked"].parts,
            push=struct.pack("<8I", outs, rows, hidden, chunk.row, chunk.rows, members, chosen, vocab),
            grid=(-(-chosen * members // each), Live("outs", cap=outs), 1),
        )
