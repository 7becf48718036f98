"""Recording the row kernels of AltUp's streams (rows.slang): one workgroup per row."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor


def record_rows(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], reads: Sequence[str], writes: Sequence[str]) -> None:
    """One dispatch of the operation's kernel for the live rows; a last output `y` is f32, f16 or q8_act."""
    rows, hidden, device = step.bind["T"], step.bind["H"], rec.device
    dtype = f".{t['y'].dtype}" if writes[-1] == "y" else ""
    kernel = rec.kernel(f"{step.op}{dtype}", STREAMS=step.bind.get("A", 1),
                        **row_sizes(hidden, device.subgroup_size, device.max_threads))
    push = struct.pack("<2I2f", CONTROL[step.extent], rows, step.attrs.get("eps", 0.0), step.attrs.get("least", 0.0))
    rec.dispatch(kernel, [p for name in reads for p in t[name].parts], [p for name in writes for p in t[name].parts], push,
                 (Live(step.extent, cap=rows),))
