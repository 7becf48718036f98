"""decode_attention: norm, rotation, append and attention of one new row per sequence in one dispatch.

The grid is constant: (kv heads, rows of the plan, KV splits). Positions in device memory determine how many workgroups
have work; unused splits come last. With several rows the grid may be (kv heads, workgroups) instead, where workgroups
take the existing splits in turn. That balances a long context among short ones. attention's dispatch merges the splits
where they are not merged in the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid.core.dtypes import DTYPES
from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.cache import cache_layout
from hybrid.kernels.vulkan.ops._combine import OUTPUTS, record_combine, two_parts
from hybrid.kernels.vulkan.ops._rows import Parts
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

MOST_SPLITS = 64
MOST_EACH = 4  # most rows that a lane of decode_attention.slang examines at once
LEAST_DEALT = 16  # fewest KV splits of the longest row where splits are distributed over workgroups
MAX_PARTS = 1024  # most rows * such KV splits: bounds the scratch memory
WORD, ELEMENTS = (
    16,
    {"f32": 4, "f16": 8, "q8_0": 16},
)  # bytes that a lane loads at once, and elements of each type in them
DEFAULT = {"groups": 528, "min_split": 64, "heads": 2, "subgroups": 8, "ahead": 8, "merge": 1, "dealt": 0, "spread": 0}
HEADS = {
    1: (1, 2),
    2: (1, 2),
    4: (1,),
    8: (1,),
    16: (1,),
}  # built variants, by words per lane (as many as 512 elements need)


@dataclass(frozen=True, slots=True)
class Shape:
    """A kernel and the KV splits of a row's context.

    heads: query heads of a workgroup. units, lanes: 16-byte words per lane, and lanes, that hold a key. piece: quads of
    the result that a subgroup merges at a time. ahead: partial results of splits that it loads at once. merge: 1: the
    last subgroup to arrive merges; 2: the same, but it polls the partial results; 0: a separate dispatch merges. dealt:
    workgroups that share the splits of a kv head's tile; 0: one workgroup per split. spread: 1: lanes that share a
    step's keys continue with one score each, which is fewer instructions in a longer dependency chain."""

    heads: int
    units: int
    lanes: int
    piece: int
    ahead: int
    subgroups: int
    splits: int
    min_split: int
    merge: int
    dealt: int
    spread: int


def shape(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv: str,
    span: int,
    block: int,
    subgroup: int,
    shared_bytes: int,
    chosen: Mapping[str, int],
) -> Shape:
    """`kv`: type of the cache. `span`: most positions that a row can see. `block`: elements of a block of the result's
    type. `shared_bytes`: limit of a workgroup."""
    words = head_dim // ELEMENTS[kv]
    units = next((u for u in HEADS if u * subgroup >= words), 0)
    if not units:
        most = max(HEADS) * subgroup * ELEMENTS[kv]
        raise VulkanError(
            f"decode_attention takes head_dim up to {most} on a device with subgroups of {subgroup}, not {head_dim}"
        )
    ratio, subgroups = heads // kv_heads, chosen["subgroups"]

    def fit(subgroups: int) -> int:
        """Heads that fit: each has its query and every subgroup's sums, maximum and softmax sum; also the new k and
        v."""
        fresh = 2 * (words * WORD + (head_dim // 32 * 4 if kv == "q8_0" else 0))
        return (shared_bytes - fresh) // (4 * head_dim * (1 + subgroups) + 8 * subgroups)

    while not fit(subgroups) and subgroups > 1:
        subgroups //= 2
    most_heads = min(ratio, chosen["heads"], max(1, fit(subgroups)))
    tile = next((h for h in HEADS[units] if h >= most_heads), HEADS[units][-1])
    if kv == "q8_0" and tile * subgroups < 2:  # the new k and v are quantised in the memory of the sums
        subgroups = 2
    lanes = 1 << (-(-words // units) - 1).bit_length()
    piece = min(subgroup, max(8, 1 << (tile * head_dim // 4 // subgroups - 1).bit_length()))
    groups = rows * kv_heads * -(-ratio // tile)
    enough, dealt = -(-chosen["groups"] // groups), 0
    if chosen["dealt"] and rows > 1:
        enough = min(max(enough, LEAST_DEALT), MAX_PARTS // rows)
        dealt = -(-chosen["groups"] * rows // groups)
    splits = max(1, min(enough, MOST_SPLITS, -(-span // chosen["min_split"])))
    dealt = min(dealt, rows * splits)
    # A block of 32 that straddles two heads cannot be written by one workgroup.
    merge = chosen["merge"] if head_dim % block == 0 else 0
    return Shape(
        tile,
        units,
        lanes,
        piece,
        chosen["ahead"],
        subgroups,
        splits,
        chosen["min_split"],
        merge,
        dealt,
        chosen["spread"],
    )


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], parts: Parts | None = None, **choice: int) -> None:
    """o[T,HQ*D] from qkv[T,(HQ+KV*HK)*D]; k and v are appended to k_cache, v_cache [B,BS,HK,D] unless KV is 0. `parts`:
    partials of qkv; qkv is then written. `choice` overrides the tuning table."""
    attend(rec, step, t, ready=False, parts=parts, **choice)


def attend(
    rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], ready: bool, parts: Parts | None = None, **choice: int
) -> None:
    """As `record`. ready: for attention's step, from q[T,HQ*D] already normed and rotated and a cache that holds the
    rows."""
    rows, heads, kv_heads, d = (step.bind[axis] for axis in ("T", "HQ", "HK", "D"))
    window, o = int(step.attrs["window"]), t["o"]
    cache = cache_layout(step, t)
    subgroup = rec.device.subgroup_size
    span = min(window, cache.context) if window else cache.context
    chosen = rec.device.tuning.choose(
        "decode_attention", DEFAULT, rows=rows, group=heads // kv_heads, kv_heads=kv_heads, head_dim=d, span=span
    )
    s = shape(
        rows,
        heads,
        kv_heads,
        d,
        cache.dtype,
        span,
        DTYPES[o.dtype].block,
        subgroup,
        rec.device.shared_bytes,
        {**chosen, **choice},
    )
    if s.merge == 2 and (s.dealt or not rec.cooperative):
        s = replace(s, merge=1)
    tiles = -(-(heads // kv_heads) // s.heads)
    context, rotary = (cache.context, 0) if ready else t["rope"].shape
    kernel = rec.kernel(
        f"decode_attention.{cache.dtype}.{s.heads}x{s.units}",
        SUBGROUP=subgroup,
        THREADS=s.subgroups * subgroup,
        LANES=s.lanes,
        MERGED=s.piece,
        MERGE=s.merge,
        OUTPUT=OUTPUTS[o.dtype],
        QUADS=d // 4,
        Q_HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK=cache.block_size,
        AHEAD=s.ahead,
        PROJECTIONS=0 if ready else step.bind["KV"],
        ROTARY=rotary // 4,
        VALUE_NORM=0 if ready else int(step.attrs["value_norm"]),
        DEALT=int(s.dealt > 0),
        EACH=min(MOST_EACH, -(-rows // subgroup)),
        SPREADS=s.spread,
        PARTS=parts.count if parts else 1,
        POLLS=rec.device.polls,
    )
    partial = rows * heads * s.splits
    memory = rec.zeros if s.merge == 2 else rec.scratch
    part_o, part_ml = memory(partial * d * 4), memory(partial * (d // 4 if s.merge else 1) * 8)
    arrived = rec.counters(rows * kv_heads * tiles * -(-s.heads * d // 4 // s.piece))
    push = struct.pack(
        "<6I2f4I",
        rows,
        context,
        cache.table_width,
        cache.slots,
        cache.blocks,
        window,
        0.0 if ready else step.attrs["eps"],
        step.attrs["scale"],
        s.splits,
        s.min_split,
        CONTROL[step.extent],
        s.dealt,
    )
    queries = ("q",) * 4 if ready else ("qkv", "w_q_norm", "w_k_norm", "rope")
    reads = [p for name in (*queries, "positions", "slots", "block_table") for p in t[name].parts]
    whole = part_o  # a binding needs some buffer
    if parts:
        whole, reads = reads[0], [parts.at, *reads[1:]]
    cached = [p for name in ("k_cache", "v_cache") for p in t[name].parts]
    writes = [part_o, part_ml, arrived, whole, *two_parts(o)]
    reads, writes = ([*reads, *cached], writes) if ready else (reads, [*cached, *writes])
    grid = (kv_heads * tiles, s.dealt, 1) if s.dealt else (kv_heads * tiles, rows, s.splits)
    rec.dispatch(kernel, reads, writes, push, grid)
    if not s.merge:
        record_combine(rec, step, t, part_o, part_ml, s.splits, s.min_split)
