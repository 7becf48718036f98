"""Which elements of a matrix operand a lane holds is the implementation's choice. Kernels that decode weights into the
registers of the lane that multiplies them (gemm_n8.slang, gemm_n8_split_k.slang, gemm_64x384.slang, gemm_128x256.slang)
are for one choice. A device is asked when it is opened: one dispatch of a few microseconds."""

from __future__ import annotations

from typing import Any

from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.kernels.vulkan.features import F16_EIGHTS
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.spec.cost import Cost

KERNEL, SUBGROUP = "probe_lanes", 32


def measured(device: Any) -> dict[str, Any]:
    """Of a device's Report: `lanes`, does every lane hold what probe_lanes.slang says, and `fused`, does fma() of
    halves round once? Nothing where the device has no such matrix units, or its folder of kernels lacks the one that
    asks."""
    shapes = device.has("f16_matrices") and F16_EIGHTS in device.report.matrices
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
