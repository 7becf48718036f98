"""Binding of fused_qkv."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], partials: int = 0) -> None:
    """qkv f32 [T,(HQ+2*HK)*D] = x [T,H] @ w.T: one product over the rows of q, k and v, whose types may differ (Q4_K_M
    has v in q6_k). `partials`: qkv is f32 [partials*T,..] of kept partials (linear())."""
    linear(rec, t["x"], t["w"], t["qkv"].parts[0], rows=step.bind["T"], extent=step.extent, partials=partials)
