"""Binding of expert_rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y [T*K,H]: the norm of each live row of x, at each of its places; f32, f16 or q8_act."""
    rows, y = step.bind["T"], t["y"]
    sizes = row_sizes(step.bind["H"], rec.device.subgroup_size, rec.device.max_threads)
    rec.dispatch(
        rec.kernel(f"expert_rows.{y.dtype}", **sizes),
        reads=[p for name in ("x", "w", "places") for p in t[name].parts],
        writes=y.parts,
        push=struct.pack("<2IfI", CONTROL[step.extent], rows, step.attrs["eps"], step.bind["K"]),
        grid=(Live(step.extent, cap=rows),),
    )
