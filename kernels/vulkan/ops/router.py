"""Binding of router."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor

FEW = 32  # rows that read the whole matrix each
EXPERTS, PARTS = 2, 4  # of router.slang: experts of a workgroup, and subgroups of each


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """logits f32 [T,X] = (rms(x) * scale) @ w.T, for the live rows. Many rows are normed first."""
    rows, hidden, experts = (step.bind[axis] for axis in ("T", "H", "X"))
    x, scale, device, extent = t["x"], t["scale"].parts, rec.device, CONTROL[step.extent]
    threads = EXPERTS * PARTS * device.subgroup_size
    if rows <= FEW and len(t["w"].chunks) == 1 and threads <= device.max_threads:
        rec.dispatch(
            rec.kernel("router", SUBGROUP=device.subgroup_size, WG=threads),
            reads=[*x.parts, *scale, *t["w"].parts],
            writes=t["logits"].parts,
            push=struct.pack("<4If", extent, rows, hidden // 4, experts, step.attrs["eps"]),
            grid=(-(-experts // EXPERTS), Live(step.extent, cap=rows)),
        )
        return
    normed = rec.scratch(4 * rows * hidden)
    kernel = rec.kernel("rmsnorm.f32", **row_sizes(hidden, device.subgroup_size, device.max_threads))
    push = struct.pack("<2If", extent, rows, step.attrs["eps"])
    rec.dispatch(kernel, [*x.parts, *scale], [normed], push, (Live(step.extent, cap=rows),))
    beside = replace(x, name=f"{x.name}.normed", chunks=(Chunk(0, rows, (normed,), "f32"),))
    linear(rec, beside, t["w"], t["logits"].parts[0], rows=rows, extent=step.extent)
