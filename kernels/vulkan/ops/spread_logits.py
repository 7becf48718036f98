"""Binding of spread_logits."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

SLICE = 2048


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """logits f32 [O,V] of picked f32 [O,K*M], for the live outputs."""
    outs, rows, (vocab,) = step.bind["O"], step.bind["R"], t["members"].shape
    rec.dispatch(
        rec.kernel("spread_logits", SUBGROUP=rec.device.subgroup_size),
        reads=[p for name in ("picked", "members", "clusters", "out_rows") for p in t[name].parts],
        writes=t["logits"].parts,
        push=struct.pack("<5I", outs, rows, vocab, step.bind["M"], step.bind["K"]),
        grid=(-(-vocab // SLICE), Live("outs", cap=outs), 1),
    )
