"""Binding of logits."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """logits f32 [O,V] = x[out_rows] @ w [V,H].T, softcapped where the step says so."""
    linear(
        rec,
        t["x"],
        t["w"],
        t["logits"].parts[0],
        rows=step.bind["O"],
        extent=step.extent,
        out_rows=t["out_rows"].parts[0],
        softcap=float(step.attrs.get("softcap", 0.0)),
    )
