"""Binding of top_experts."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """experts i32 [T,K] and gates f32 [T,K] of logits [T,X], for the live rows."""
    rows, experts, chosen = (step.bind[axis] for axis in ("T", "X", "K"))
    rec.dispatch(
        rec.kernel("top_experts", WG=min(128, rec.device.max_threads)),
        reads=[*t["logits"].parts, *t["expert_scale"].parts],
        writes=[*t["experts"].parts, *t["gates"].parts],
        push=struct.pack("<4If", CONTROL[step.extent], rows, experts, chosen, step.attrs["scale"]),
        grid=(Live(step.extent, cap=rows),),
    )
