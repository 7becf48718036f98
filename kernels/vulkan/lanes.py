"""Probe of a device's cooperative-matrix lane layout: one dispatch when the device is opened.

Vulkan leaves open which elements of an operand a lane holds. Kernels that dequantise weights into the registers of the
multiplying lane (gemm_n8.slang, gemm_n8_split_k.slang, gemm_64x384.slang, gemm_128x256.slang) assume one layout.
"""

from __future__ import annotations

from typing import Any

from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.kernels.vulkan.features import F16_N8
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.spec.cost import Cost

KERNEL, SUBGROUP = "probe_lanes", 32


def measured(device: Any) -> dict[str, Any]:
    """Fields of a device's Report. `lanes`: whether every lane holds what probe_lanes.slang expects. `fused`: whether
    fma() on f16 rounds once. Empty where the device has no such matrix units, or its SPIR-V folder lacks the probe."""
    shapes = device.has("f16_matrices") and F16_N8 in device.report.matrices
    if not shapes or device.subgroup_size != SUBGROUP or not device.kernels_named(KERNEL):
        return {}
    device.store(TensorDecl(KERNEL, "u32", (2,), "io"))
    program = None
    try:
        words = device.tensor(KERNEL).parts
        recorder = Recorder(device, words[0])
        recorder.dispatch(device.kernel(KERNEL), reads=(), writes=words)
        program = device.program_type(
            device, Plan(KERNEL, 1, 0, (Step(KERNEL, KERNEL, {}, {}),), {}), recorder, False, cost=Cost()
        )
        device.wait(program.submit())
        held, fused = device.read(KERNEL).array
        return {"lanes": int(held) == SUBGROUP, "fused": int(fused) == SUBGROUP}
    finally:
        if program is not None:
            program.close()
        device.drop(KERNEL)
