"""attention: flash attention over the paged cache.

Many rows (prefill) with an f16 or q8_0 cache and the heads of FLASH run on matrix units in one dispatch. Other cases
take two dispatches: partial results of KV splits, then their merge.

Few rows: one row and kv head per tile, and enough KV splits to fill the device; or decode_attention's kernel with
ready queries, where the tuning table asks for it. Many rows: neighbouring rows share every load of K and V, and a KV
split is as long as a shader's loops may run.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.cache import CacheLayout, cache_layout
from hybrid.kernels.vulkan.ops import decode_attention
from hybrid.kernels.vulkan.ops._combine import OUTPUTS, record_combine, seen, two_parts, views, window_of
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

WIDTH = 32  # threads of a workgroup of attention.slang: WIDTH / subgroup size tiles
DECODE_ROWS = 32  # most rows of a plan whose KV splits fill the device
MIN_SPLIT = 128  # fewest positions of a KV split with few rows
LOOPS = 60_000  # loop iterations of one invocation: llvmpipe silently ends every loop after 65535 in all
MAX_SPLITS = 64
MAX_PARTS = 1024  # most rows * KV splits: bounds the scratch memory
# Columns per subgroup that flash_attention.slang is built for, by cache type and head_dim.
FLASH: dict[str, dict[int, tuple[int, ...]]] = {
    "f16": {64: (64,), 128: (64, 128), 256: (64, 128, 256), 512: (128, 256)},
    "q8_0": {128: (128,), 256: (128,), 512: (128,)},
}
PAIRS = 128  # rows times heads of its tile, where each subgroup has all columns of a head
FLASH_DEFAULT, FEW_DEFAULT = {"columns": 256}, {"decode": 0}
QUERIES = {1: (2, 4, 8), 2: (2, 4, 8), 4: (2, 4), 8: (2,), 16: (2,)}  # built variants, by units per lane


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel, and what its tile covers: rows * heads (of one kv head) <= queries."""

    units: int
    queries: int
    rows: int
    heads: int
    splits: int
    min_split: int
    """Fewest positions of a KV split. Splits get longer, all alike, where `splits` of them do not cover the context."""


def longest_split(units: int, rows: int, subgroup: int) -> int:
    """Most positions of a KV split with a tile's loops within LOOPS, each of its rows in another sequence."""
    step = (units + 2) * (subgroup + 1) + 1  # iterations of attention.slang's step(), for two keys per lane
    return max(1, LOOPS // (rows * step)) * 2 * subgroup


def tiling(rows: int, ratio: int, head_dim: int, span: int, subgroup: int, kv: str = "f16") -> Tiling:
    """Tiling for `ratio` query heads per kv head, rows that see at most `span` positions, and a `kv` cache."""
    units = next((u for u in QUERIES if u * subgroup * 4 >= head_dim), 0)
    if not units:
        raise VulkanError(
            f"attention takes head_dim up to {max(QUERIES) * subgroup * 4} on a device with subgroups of "
            f"{subgroup}, not {head_dim}"
        )
    # A CPU driver compiles unrolled registers slowly and gains little from them. gfx1103 spills with heads of 512.
    most = 8 if subgroup < 16 or head_dim > 256 else 16
    built = [q for q in QUERIES[units] if q <= (4 if kv == "q8_0" else 8)]
    fit = [q for q in built if q * units <= most] or [built[0]]
    if rows > DECODE_ROWS:
        queries = fit[-1]
        heads = min(ratio, queries)
        tile_rows = queries // heads
        length = longest_split(units, tile_rows, subgroup)
        return Tiling(units, queries, tile_rows, heads, -(-span // length), length)
    queries = next((q for q in fit if q >= ratio), fit[-1])
    splits = min(-(-span // MIN_SPLIT), MAX_SPLITS, MAX_PARTS // rows)
    splits = max(splits, -(-span // longest_split(units, 1, subgroup)))
    return Tiling(units, queries, 1, min(ratio, queries), splits, MIN_SPLIT)


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """o[T,HQ*D] = softmax(scale q.k) v over the positions that each live row sees; o f32, f16 or q8_act. Of attention, and
    of view_attention, whose rows have `views` in place of `positions` and a window."""
    rows, cache, device, window = step.bind["T"], cache_layout(step, t), rec.device, window_of(step)
    span = min(window, cache.context) if window else cache.context
    facts = {"rows": rows, "head_dim": step.bind["D"], "span": span}
    on_units = device.subgroup_size == 32 and device.has("f16_matrices")
    own = flash_columns(rec, step, cache) if on_units and rows > DECODE_ROWS and step.extent == "rows" else 0
    if own:
        record_flash(rec, step, t, cache, own)
    elif (
        "views" not in t
        and rows <= DECODE_ROWS
        and device.tuning.choose("few_attention", FEW_DEFAULT, **facts)["decode"]
    ):
        decode_attention.attend(rec, step, t, ready=True)
    else:
        record_split(rec, step, t, cache)


def flash_columns(rec: Recorder, step: Step, cache: CacheLayout) -> int:
    """Columns of a head per subgroup of flash_attention.slang: the most built variant that the tuning table allows, 0
    where there is none."""
    rows, heads, d, window = step.bind["T"], step.bind["HQ"], step.bind["D"], window_of(step)
    built = FLASH.get(cache.dtype, {}).get(d, ())
    if not built:
        return 0
    span = min(window, cache.context) if window else cache.context
    chosen = rec.device.tuning.choose(
        "flash_attention", FLASH_DEFAULT, rows=rows, pairs=rows * heads, head_dim=d, span=span
    )
    return max((own for own in built if own <= chosen["columns"]), default=0)


def record_flash(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], cache: CacheLayout, own: int) -> None:
    """Record flash_attention.slang: tiles of rows and heads, longest contexts first. `own`: columns of a subgroup."""
    rows, heads, kv_heads, d = (step.bind[axis] for axis in ("T", "HQ", "HK", "D"))
    window = window_of(step)
    pairs = PAIRS * own // d
    tile_heads = min(heads // kv_heads, pairs)
    tile_rows = pairs // tile_heads
    of = "" if cache.dtype == "f16" else f"{cache.dtype}."
    kernel = rec.kernel(f"flash_attention.{of}{d}.{own}", OUTPUT=OUTPUTS[t["o"].dtype], **views(t))
    push = struct.pack(
        "<8If2I",
        rows,
        heads,
        kv_heads,
        cache.block_size,
        cache.table_width,
        cache.slots,
        cache.blocks,
        window,
        step.attrs["scale"],
        tile_rows,
        tile_heads,
    )
    names = ("q", "k_cache", "v_cache", "block_table", "slots", seen(t))
    grid = (kv_heads * -(-(heads // kv_heads) // tile_heads), Live(step.extent, per=tile_rows, cap=rows))
    rec.dispatch(kernel, [p for name in names for p in t[name].parts], two_parts(t["o"]), push, grid)


def record_split(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor], cache: CacheLayout) -> None:
    """Record KV splits, one subgroup each, then their merge."""
    rows, heads, kv_heads, d = (step.bind[axis] for axis in ("T", "HQ", "HK", "D"))
    window = window_of(step)
    subgroup = rec.device.subgroup_size
    span = min(window, cache.context) if window else cache.context
    tile = tiling(rows, heads // kv_heads, d, span, subgroup, cache.dtype)

    parts = rows * heads * tile.splits
    part_o, part_ml = rec.scratch(parts * d * 4), rec.scratch(parts * 8)
    kernel = rec.kernel(f"attention.{cache.dtype}.{tile.queries}x{tile.units}", SUBGROUP=subgroup, **views(t))
    push = struct.pack(
        "<9If5I",
        rows,
        heads,
        kv_heads,
        d // 4,
        cache.block_size,
        cache.table_width,
        cache.slots,
        cache.blocks,
        window,
        step.attrs["scale"],
        tile.rows,
        tile.heads,
        tile.splits,
        tile.min_split,
        CONTROL[step.extent],
    )
    head_tiles = -(-(heads // kv_heads) // tile.heads)
    splits = Live("context", per=tile.min_split, cap=tile.splits * tile.min_split) if tile.splits > 1 else 1
    names = ("q", "k_cache", "v_cache", "block_table", "slots", seen(t))
    grid = (Live(step.extent, per=tile.rows * (WIDTH // subgroup), cap=rows), kv_heads * head_tiles, splits)
    rec.dispatch(kernel, [p for name in names for p in t[name].parts], [part_o, part_ml], push, grid)

    record_combine(rec, step, t, part_o, part_ml, tile.splits, tile.min_split)
