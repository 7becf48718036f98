"""Binding of dequantize."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.ops._gemm import unpack
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 or f16 [N,K] = w dequantised: one dispatch per chunk of w."""
    for chunk in t["w"].chunks:
        unpack(rec, chunk, t["y"].dtype, t["y"].parts[0], t["w"].shape[-1], chunk.row)
