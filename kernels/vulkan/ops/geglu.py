"""Binding of geglu."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._linear import geglu
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """h [T,F] = gelu_tanh(gate) * up of gate_up f32 [T,2F]."""
    geglu(
        rec,
        t["gate_up"].parts[0],
        t["h"],
        rows=step.bind["T"],
        extent=step.extent,
        sparsity=float(step.attrs.get("sparsity", 0.0)),
    )
