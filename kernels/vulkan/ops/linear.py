"""Binding of linear."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], partials: int = 0) -> None:
    """y f32 [T,N] = x [T,K] @ w [N,K].T: one dispatch per chunk of w. `partials`: y is f32 [partials*T,N] of kept
    partials (linear())."""
    linear(rec, t["x"], t["w"], t["y"].parts[0], rows=step.bind["T"], extent=step.extent, partials=partials)
