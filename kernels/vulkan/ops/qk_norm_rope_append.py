"""qk_norm_rope_append: per-head norm and rotation of q and k, and the append of k and v to the paged cache."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.cache import cache_layout
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

WIDTH = 64  # threads of a workgroup, as in the shader


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """q[T,HQ*D] from qkv[T,(HQ+KV*HK)*D]; k and v of the live rows into k_cache, v_cache [B,BS,HK,D], unless KV is
    0."""
    rows, heads, kv_heads, d = (step.bind[axis] for axis in ("T", "HQ", "HK", "D"))
    cache = cache_layout(step, t)
    kernel = rec.kernel(f"qk_norm_rope_append.{cache.dtype}", SUBGROUP=rec.device.subgroup_size)
    projections, (context, rotary) = step.bind["KV"], t["rope"].shape
    push = struct.pack(
        "<9If4I",
        rows,
        heads,
        kv_heads,
        d // 8,
        context,
        cache.block_size,
        cache.table_width,
        cache.slots,
        cache.blocks,
        step.attrs["eps"],
        CONTROL[step.extent],
        projections,
        rotary // 8,
        int(step.attrs["value_norm"]),
    )
    names = ("qkv", "w_q_norm", "w_k_norm", "rope", "positions", "slots", "block_table")
    reads = [p for name in names for p in t[name].parts]
    writes = [*t["q"].parts, *t["k_cache"].parts, *t["v_cache"].parts]
    per_group = WIDTH // rec.device.subgroup_size
    all_heads = heads + (2 * kv_heads if projections else 0)
    rec.dispatch(kernel, reads, writes, push, (Live(step.extent, cap=rows), -(-all_heads // per_group)))
