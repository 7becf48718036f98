"""top_experts, group_experts and expert_rows of a few rows in one dispatch (expert_route.slang)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.ops.rmsnorm import row_sizes
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

OPS = ("top_experts", "group_experts", "expert_rows")
MOST_KEYS, MOST_PAIRS, MOST_CHOSEN = 2048, 256, 64  # of expert_route.slang: logits and choices of all rows, K


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """experts, gates and places [T,K], order [T*K], spans [X,2] and the pairs' number, and the norms of x [T,H] at their places.

    False where the steps are unconnected, their rows' logits or choices do not fit into shared memory, or a result
    overwrites an input that another workgroup may not have read yet."""
    (chosen, _, _), (first, second, third) = steps, t
    rows, experts, k, y = chosen.bind["T"], chosen.bind["X"], chosen.bind["K"], third["y"]
    follow = (
        chosen.args["experts"] == steps[1].args["experts"]
        and steps[1].args["places"] == steps[2].args["places"]
        and len({(s.extent, s.counts) for s in steps}) == 1
    )
    fits = rows * experts <= MOST_KEYS and rows * k <= MOST_PAIRS and k <= MOST_CHOSEN and y.dtype != "f32"
    if not (follow and fits):
        return False
    reads = [p for name in ("logits", "expert_scale") for p in first[name].parts]
    reads += [p for name in ("x", "w") for p in third[name].parts]
    made = [
        *(p for name in ("experts", "gates") for p in first[name].parts),
        *(p for name in ("places", "order", "spans", "pairs") for p in second[name].parts),
        *y.parts,
    ]
    if any(a.overlaps(b) for a in made for b in reads):
        return False
    sizes = row_sizes(steps[2].bind["H"], rec.device.subgroup_size, rec.device.max_threads)
    push = struct.pack(
        "<2If2If", CONTROL[chosen.extent], rows, steps[2].attrs["eps"], k, experts, chosen.attrs["scale"]
    )
    rec.dispatch(rec.kernel(f"expert_route.{y.dtype}", **sizes), reads, made, push, (Live(chosen.extent, cap=rows),))
    return True
