"""Matrix products on matrix units: choice of the tile (gemm.slang), dequantisation inside the kernel or before it, and
split-K where the tiles do not fill the device (gemm_split_k.slang)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from hybrid.core.dtypes import DTYPES
from hybrid.kernels.vulkan.kernel import Kernel
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.recorder import GridAxis, Live, Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor
from hybrid.kernels.vulkan.types import QUANTISED

# As in the shaders: rows and columns of a workgroup's tile by name, subgroup size, and the types of operands.slang.
TILES = {
    f"{rows}x{columns}": (rows, columns)
    for columns, heights in (
        (384, (64, 24)),
        (256, (128, 48, 40, 32, 24, 16, 8)),
        (192, (128,)),
        (128, (96,)),
        (64, (64, 32)),
        (32, (8,)),
        (16, (8,)),
    )
    for rows in heights
}
DEFAULTS = ("128x192", "96x128", "64x64", "32x64")
SUBGROUP = 32
# Columns of K in a stage, which are also the fewest columns of K. STAGE: tiles with weights in shared memory, and
# 128x256. REGISTER_STAGE: other tiles that dequantise into registers.
STAGE, REGISTER_STAGE = 64, 256
MANY_ROWS, SPLIT_SUBGROUPS = "128x256", ("8x16", "8x32")  # gemm_128x256.slang, gemm_n8_split_k.slang
N8 = ("8x256", "16x256", "24x256", "32x256", "40x256", "48x256")  # gemm_n8.slang
# Tiles that dequantise weights into registers, by family and type. They need K of whole pairs of blocks and the lane
# layout of lanes.py; elsewhere a default tile is used.
REGISTER_TILES = {
    ("linear", "q4_0"): (*N8, MANY_ROWS, "8x16"),
    ("linear", "q6_k"): ("8x256", "16x256", "32x256", "40x256"),
    ("ffn_up", "q4_0"): (*N8, "24x384", "64x384", MANY_ROWS, "8x32"),
}
MOST_SPLITS, MOST_PARTS, KEPT = 16, 8, 1 << 31  # as in gemm_split_k.slang and partials.slang
SHORT = 256  # most rows for which a product's code is kept short rather than unrolled (gemm_result.slang)
# In stages of the tile: a workgroup's prologue and epilogue, and the sum of a split. Default 2.0 and 0.5.
ENDS, SUMS = {"128x192": 3.0}, {"128x192": 1.8}
# Of gemm_n8_split_k.slang: columns of K per subgroup and step, and the most subgroups that share K.
SUBGROUP_STAGE, MOST_SUBGROUPS = 128, 16
TYPES = ("f16", "bf16", *QUANTISED)
ENOUGH = 96  # workgroups that fill a large device; below it the next smaller tile is faster (H200)
WIDE = 32768  # groups along a grid's x axis, as in wide_group() of types.slang

Grid = tuple[GridAxis, GridAxis, GridAxis]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A kernel, its grid (rows vary fastest: see gemm.slang) and its weight. For split-K also the end of the push
    constants, and the buffers written beside the result: partial sums and arrival counters."""

    kernel: Kernel
    grid: Grid
    weight: tuple[Slice, ...]
    push: bytes
    beside: tuple[Slice, ...]


def wide(groups: int) -> tuple[int, int]:
    """Groups along x as (x, z) of a grid whose x axis is limited; kernels read them back with wide_group()."""
    return min(groups, WIDE), -(-groups // WIDE)


def unit(dtype: str) -> int:
    """Elements of a weight that one thread dequantises at a time (UNIT of the type in types.slang)."""
    return 16 if DTYPES[dtype].quantised else 8


def gemm(
    rec: Recorder,
    family: str,
    x: DeviceTensor,
    w: Chunk,
    y: Slice,
    *,
    rows: int,
    extent: str,
    partials: int = 0,
    **constants: int,
) -> Gemm | None:
    """The kernel of a family (linear, ffn_up) for f16 rows of x, or None where the device or the types have none.

    `y`: some part of the result. `partials`: number of kept partials (kept_splits()); the result then has that many
    times its rows. Where the tuning table says `unpack`, a dispatch first dequantises the weight to f16 in scratch
    memory.
    """
    device, k = rec.device, x.shape[-1]
    if not takes(device, x, w):
        return None
    use = tile_for(device, family, w.dtype, rows, w.rows, k)
    parts, dtype = w.parts, w.dtype
    if use["unpack"] and dtype != "f16" and 2 * w.rows * k <= device.max_range:
        scratch = rec.scratch(2 * w.rows * k)
        unpack(rec, w, "f16", scratch, k, first=0)
        parts, dtype = (scratch,), "f16"
    tile = tile_of(device, family, use["tile"], dtype, rows, w.rows, k)
    tall, across = TILES[tile]
    if tile in SPLIT_SUBGROUPS:
        kernel = rec.kernel(
            f"{family}.gemm.{dtype}.{x.dtype}.{tile}", THREADS=split_threads(device, tile, k), K=k, **constants
        )
        return Gemm(kernel, (Live(extent, per=tall, cap=rows), -(-w.rows // across), 1), parts, b"", ())
    if dtype == "q6_k" and tile in REGISTER_TILES["linear", "q6_k"]:
        constants["FUSED"] = int(device.has("fused_halves"))
    kernel = rec.kernel(f"{family}.gemm.{dtype}.{x.dtype}.{tile}", ONCE=int(rows <= SHORT), **constants)
    down, columns = -(-rows // tall), -(-w.rows // across)
    whole, splits = split_k(
        down,
        columns,
        -(-k // stage_of(tile)),
        use["groups"],
        device.max_range // (4 * tall * across),
        ENDS.get(tile, 2.0),
        SUMS.get(tile, 0.5),
    )
    beside = (y, y)  # without split-K: bindings need some buffer, and this one adds no hazard
    if partials:
        whole, splits = 0, partials
    elif splits > 1:
        tiles = down * (columns - whole)
        beside = (rec.scratch(4 * tall * across * tiles * splits), rec.counters(tiles))
    grid = (Live(extent, per=tall, cap=rows), whole + (columns - whole) * splits, 1)
    return Gemm(kernel, grid, parts, struct.pack("<2I", whole, splits | (KEPT if partials else 0)), beside)


def takes(device: Any, x: DeviceTensor, w: Chunk) -> bool:
    """Whether the device multiplies these types on its matrix units."""
    types = x.dtype == "f16" and w.dtype in TYPES and x.shape[-1] >= STAGE
    return types and device.has("f16_matrices") and device.subgroup_size == SUBGROUP


def kept_splits(rec: Recorder, x: DeviceTensor, w: Chunk, *, rows: int) -> int:
    """Number of K splits whose partials are kept for the reader to add up, of `rows` rows of x by w. 0 where the tuning
    table does not ask for it, or where the tiles fill the device without a split."""
    device, k = rec.device, x.shape[-1]
    if not takes(device, x, w):
        return 0
    use, facts = tile_for(device, "linear", w.dtype, rows, w.rows, k), {"w": w.dtype, "rows": rows, "n": w.rows, "k": k}
    most = min(device.tuning.choose("linear.partials", {"most": 0}, **facts)["most"], MOST_PARTS)
    tile = tile_of(device, "linear", use["tile"], w.dtype, rows, w.rows, k)
    if most < 2 or tile in SPLIT_SUBGROUPS or use["unpack"]:
        return 0
    tall, across = TILES[tile]
    down, columns, stages = -(-rows // tall), -(-w.rows // across), -(-k // stage_of(tile))
    whole, splits = split_k(down, columns, stages, use["groups"], device.max_range // (4 * rows * w.rows), most=most)
    return splits if not whole and splits > 1 else 0


def tile_of(device: Any, family: str, tile: str, dtype: str, rows: int, n: int, k: int) -> str:
    """The tile that the tuning table names, or a default where the device or the types have no such kernel."""
    shared = tile in DEFAULTS or goes_to_registers(device, family, tile, dtype, k)
    return tile if shared else default_tile(rows, n)


def stage_of(tile: str) -> int:
    """Columns of K per stage of the tile's kernel."""
    return STAGE if tile in (*DEFAULTS, MANY_ROWS) else REGISTER_STAGE


def tile_for(device: Any, family: str, dtype: str, rows: int, n: int, k: int) -> dict[str, Any]:
    """The tuning table's choice for `rows` rows by w [n, k]. A tile "rowsxN" means the lowest of N columns that holds
    the rows."""
    default = {"tile": default_tile(rows, n), "unpack": False, "groups": "1 * cores"}
    use = device.tuning.choose(f"{family}.gemm", default, w=dtype, rows=rows, n=n, k=k)
    height, _, columns = use["tile"].partition("x")
    if height == "rows":
        use["tile"] = lowest_tile(family, dtype, rows, int(columns)) or default_tile(rows, n)
    return use


def lowest_tile(family: str, dtype: str, rows: int, columns: int) -> str:
    """The lowest tile of so many columns that holds the rows, in equal parts where none does; "" where there is
    none."""
    tiles = [t for t in REGISTER_TILES.get((family, dtype), ()) if TILES[t][1] == columns and t != MANY_ROWS]
    heights = sorted(TILES[t][0] for t in tiles)
    parts = -(-rows // heights[-1]) if heights else 0
    return next((f"{h}x{columns}" for h in heights if h * parts >= rows), "")


def goes_to_registers(device: Any, family: str, tile: str, dtype: str, k: int) -> bool:
    """Whether the device has a kernel of this tile that dequantises into registers, for these types and K."""
    return tile in REGISTER_TILES.get((family, dtype), ()) and k % 64 == 0 and device.has("matrix_lanes")


def split_threads(device: Any, tile: str, k: int) -> int:
    """Threads of a workgroup of gemm_n8_split_k.slang: the fewest subgroups that need no more steps over K than the
    most do. Their sums are in shared memory at once."""
    rows, columns = TILES[tile]
    stages, most = -(-k // SUBGROUP_STAGE), min(MOST_SUBGROUPS, device.shared_bytes // (rows * (4 * columns + 16)))
    return SUBGROUP * -(-stages // -(-stages // most))


def split_k(
    down: int,
    columns: int,
    stages: int,
    groups: int,
    room: int,
    ends: float = 2.0,
    sums: float = 0.5,
    most: int = MOST_SPLITS,
) -> tuple[int, int]:
    """(columns of tiles without split, K splits of the remaining tiles) of down x columns tiles.

    A device runs `groups` workgroups at once; a tile takes `stages`. Only the last columns of tiles, a partial wave,
    are split. `room`: tiles whose partial sums fit in memory. `ends`, `sums`: cost in stages of a workgroup's start and
    end, and of adding a split's sums. `most`: most splits. (columns, 1): no split."""
    whole = down * columns // groups * groups // down if groups else columns
    tiles = down * (columns - whole)

    def cost(splits: int) -> float:  # in stages
        return -(-tiles * splits // groups) * (-(-stages // splits) + ends) + splits * sums

    most = min(stages, most, room // tiles) if tiles else 0
    splits = min(range(1, most + 1), key=cost, default=1)
    return (whole, splits) if splits > 1 else (columns, 1)


def default_tile(rows: int, columns: int) -> str:
    """The largest tile that the rows fill to half and that gives ENOUGH workgroups, else the smallest."""
    fitting = (
        name
        for name in DEFAULTS
        if TILES[name][0] < 2 * rows and -(-rows // TILES[name][0]) * -(-columns // TILES[name][1]) >= ENOUGH
    )
    return next(fitting, "32x64")


def unpack(rec: Recorder, w: Chunk, dtype: str, y: Slice, k: int, first: int) -> None:
    """y [.., k] f32 or f16, from row `first` on = the dequantised chunk of weights."""
    per_row = k // unit(w.dtype)
    x, z = wide(-(-w.rows * per_row // 64))
    rec.dispatch(
        rec.kernel(f"dequantize.{w.dtype}.{dtype}"),
        reads=w.parts,
        writes=[y],
        push=struct.pack("<3I", first * per_row, w.rows * per_row, per_row),
        grid=(x, 1, z),
    )
