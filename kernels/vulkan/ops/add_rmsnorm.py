"""add_rmsnorm: residual add and the next norm, one workgroup per row."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops._rows import Parts, with_parts
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], parts: Parts | None = None) -> None:
    """sum[T,H] = (residual + rms(a) * w_post) * scale and y[T,H] = rms(sum) * w_next, for the live rows; y f32, f16 or
    q8_act. `parts`: partials of a; a is then written."""
    rows, hidden = step.bind["T"], step.bind["H"]
    y, some = t["y"], t["sum"].parts[0]
    reads = [p for name in ("a", "residual", "w_post", "w_next") for p in t[name].parts]
    given, whole, count = with_parts(reads, some, parts)
    kernel = rec.kernel(f"add_rmsnorm.{y.dtype}", **row_sizes(hidden, rec.device.subgroup_size, rec.device.max_threads))
    push = struct.pack("<2I2f", CONTROL[step.extent], rows, step.attrs["eps"], step.attrs.get("scale", 1.0)) + count
    rec.dispatch(kernel, given, [*t["sum"].parts, *y.parts, whole], push, (Live(step.extent, cap=rows),))
