"""Binding of top_clusters."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """clusters i32 [T,K] of scores f32 [T,C], for the live rows."""
    rows, count, chosen = (step.bind[axis] for axis in ("T", "C", "K"))
    rec.dispatch(
        rec.kernel("top_clusters", SUBGROUP=rec.device.subgroup_size),
        reads=t["scores"].parts,
        writes=t["clusters"].parts,
        push=struct.pack("<3I", rows, count, chosen),
        grid=(-(-count // 32), Live("rows", cap=rows), 1),
    )
