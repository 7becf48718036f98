"""add_rmsnorm and router of a few rows in one dispatch (add_router.slang)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops.rmsnorm import HELD, row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

OPS = ("add_rmsnorm", "router")
EXPERTS, FEW = 2, 4  # experts of a workgroup, as in add_router.slang; rows that read all of them each


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """sum, y [T,H] and logits f32 [T,X] of the live rows.

    False where the router reads another tensor, rows are many or do not fit into registers, or a result overwrites an
    input that another workgroup may not have read yet."""
    (add, router), (first, second), device = steps, t, rec.device
    rows, hidden, experts = (router.bind[axis] for axis in ("T", "H", "X"))
    sizes = row_sizes(hidden, device.subgroup_size, device.max_threads)
    follow = add.args["sum"] == router.args["x"] and (add.extent, add.counts) == (router.extent, router.counts)
    fits = rows <= FEW and hidden <= 4 * HELD * sizes["WG"] and len(second["w"].chunks) == 1
    if not (follow and fits and add.attrs["eps"] == router.attrs["eps"]):
        return False
    reads = [p for name in ("a", "residual", "w_post", "w_next") for p in first[name].parts]
    reads += [p for name in ("scale", "w") for p in second[name].parts]
    made = [*(p for name in ("sum", "y") for p in first[name].parts), *second["logits"].parts]
    if any(a.overlaps(b) for a in made for b in reads):
        return False
    push = struct.pack("<2I2fI", CONTROL[add.extent], rows, add.attrs["eps"], add.attrs.get("scale", 1.0), experts)
    grid = -(-experts // EXPERTS), Live(add.extent, cap=rows)
    rec.dispatch(rec.kernel(f"add_router.{first['y'].dtype}", **sizes), reads, made, push, grid)
    return True
