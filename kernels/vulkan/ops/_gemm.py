"""Which matrix products go to the matrix units, by which tile (gemm.slang), with weights decoded on the way or before,
and split-K where the tiles do not fill the device (gemm_split_k.slang)."""

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

# These repeat the shader's: rows and columns of a workgroup's tile by name, its subgroups' size, and the types that
# operands.slang decodes.
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
# Columns of K in a stage, and the fewest that there must be: of tiles in shared memory and of 128x256; of other tiles whose
# weights go straight into registers.
STAGE, REGISTER_STAGE = 64, 256
MANY_ROWS, SPLIT_SUBGROUPS = "128x256", ("8x16", "8x32")  # gemm_128x256.slang, gemm_n8_split_k.slang
N8 = ("8x256", "16x256", "24x256", "32x256", "40x256", "48x256")  # gemm_n8.slang
# Tiles whose weights go straight into registers, by family and type: for pairs of blocks, and devices whose lanes hold the
# elements that these kernels count on (lanes.py). Elsewhere a default tile takes their place.
REGISTER_TILES = {
    ("linear", "q4_0"): (*N8, MANY_ROWS, "8x16"),
    ("linear", "q6_k"): ("8x256", "16x256", "32x256", "40x256"),
    ("ffn_up", "q4_0"): (*N8, "24x384", "64x384", MANY_ROWS, "8x32"),
}
MOST_SPLITS, MOST_PARTS, KEPT = 16, 8, 1 << 31  # repeat gemm_split_k.slang's and partials.slang's
SHORT = 256  # rows up to which a product's code is short rather than unrolled (gemm_result.slang)
# In stages of the tile: prologue and epilogue of a workgroup, and the sums of a split; other tiles 2.0 and 0.5.
ENDS, SUMS = {"128x192": 3.0}, {"128x192": 1.8}
# Of gemm_n8_split_k.slang: columns of K that a subgroup multiplies at a time, and the most subgroups that share K.
SUBGROUP_STAGE, MOST_SUBGROUPS = 128, 16
TYPES = ("f16", "bf16", *QUANTISED)
ENOUGH = 96  # workgroups that keep a large device busy: with fewer, on the H200, the next smaller tile was faster
WIDE = 32768  # groups along x of a grid, as wide_group() of types.slang reads them back

Grid = tuple[GridAxis, GridAxis, GridAxis]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A kernel, the grid that covers the product with its tile (rows run fastest: see gemm.slang), the weight, and of
    split-K the end of the push constants and what is written beside the result (partial sums, counters of arrivals)."""

    kernel: Kernel
    grid: Grid
    weight: tuple[Slice, ...]
    push: bytes
    beside: tuple[Slice, ...]


def wide(groups: int) -> tuple[int, int]:
    """Groups along x as (x, z) of a grid whose x axis is limited; kernels read them back with wide_group()."""
    return min(groups, WIDE), -(-groups // WIDE)


def unit(dtype: str) -> int:
    """Elements of a weight that one thread decodes at a time (UNIT of the type in types.slang)."""
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
    """The kernel of a family (linear, ffn_up) for f16 rows of x, or None where the device or the types have none. `y`:
    some part of the result. `partials`: what kept_splits() says, of a result whose K splits are left as so many times its
    rows.

    Where the tuning says `unpack`, a dispatch before it writes the weight's numbers as f16 into scratch memory.
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
    beside = (y, y)  # without split-K: bindings must hold some buffer, and this one adds no hazard
    if partials:
        whole, splits = 0, partials
    elif splits > 1:
        tiles = down * (columns - whole)
        beside = (rec.scratch(4 * tall * across * tiles * splits), rec.counters(tiles))
    grid = (Live(extent, per=tall, cap=rows), whole + (columns - whole) * splits, 1)
    return Gemm(kernel, grid, parts, struct.pack("<2I", whole, splits | (KEPT if partials else 0)), beside)


def takes(device: Any, x: DeviceTensor, w: Chunk) -> bool:
    """Whether the device multiplies such rows and weights on its matrix units."""
    types = x.dtype == "f16" and w.dtype in TYPES and x.shape[-1] >= STAGE
    return types and device.has("f16_matrices") and device.subgroup_size == SUBGROUP


def kept_splits(rec: Recorder, x: DeviceTensor, w: Chunk, *, rows: int) -> int:
    """K splits of `rows` rows of x by w where the device's table asks that whoever reads the result adds them up: 0
    where it does not, or where the tiles fill the device without."""
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
    """Columns of K that the tile's kernel multiplies at a time."""
    return STAGE if tile in (*DEFAULTS, MANY_ROWS) else REGISTER_STAGE


def tile_for(device: Any, family: str, dtype: str, rows: int, n: int, k: int) -> dict[str, Any]:
    """What the device's tuning table says of `rows` rows by w [n, k]; a tile "rowsxN" is the lowest of N columns that
    holds them."""
    default = {"tile": default_tile(rows, n), "unpack": False, "groups": "1 * cores"}
    use = device.tuning.choose(f"{family}.gemm", default, w=dtype, rows=rows, n=n, k=k)
    height, _, columns = use["tile"].partition("x")
    if height == "rows":
        use["tile"] = lowest_tile(family, dtype, rows, int(columns)) or default_tile(rows, n)
    return use


def lowest_tile(family: str, dtype: str, rows: int, columns: int) -> str:
    """The lowest tile of so many columns that holds the rows, in equal parts where none does; "": there is none."""
    tiles = [t for t in REGISTER_TILES.get((family, dtype), ()) if TILES[t][1] == columns and t != MANY_ROWS]
    heights = sorted(TILES[t][0] for t in tiles)
    parts = -(-rows // heights[-1]) if heights else 0
    return next((f"{h}x{columns}" for h in heights if h * parts >= rows), "")


def goes_to_registers(device: Any, family: str, tile: str, dtype: str, k: int) -> bool:
    """Whether the device has such a product by a tile whose weights go straight into registers."""
    return tile in REGISTER_TILES.get((family, dtype), ()) and k % 64 == 0 and device.has("matrix_lanes")


def split_threads(device: Any, tile: str, k: int) -> int:
    """Threads of a workgroup of gemm_n8_split_k.slang: the fewest subgroups that go through K in as few passes as the most do, whose
    sums are in shared memory together."""
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
    """(columns of tiles that one workgroup each computes, K splits of every other tile) of down x columns tiles, where
    a device runs `groups` workgroups at once and a tile goes through K in `stages`. Only the last columns of tiles, a
    wave that does not fill the device, are split; there is room for the partial sums of `room` tiles. `ends`, `sums`:
    stages that pass while a workgroup begins and ends, and while a split's sums are added. `most`: splits. (columns,
    1): none is."""
    whole = down * columns // groups * groups // down if groups else columns
    tiles = down * (columns - whole)

    def cost(splits: int) -> float:  # in stages
        return -(-tiles * splits // groups) * (-(-stages // splits) + ends) + splits * sums

    most = min(stages, most, room // tiles) if tiles else 0
    splits = min(range(1, most + 1), key=cost, default=1)
    return (whole, splits) if splits > 1 else (columns, 1)


def default_tile(rows: int, columns: int) -> str:
    """The largest tile that the rows fill to half and of which there are enough, else the smallest."""
    fitting = (
        name
        for name in DEFAULTS
        if TILES[name][0] < 2 * rows and -(-rows // TILES[name][0]) * -(-columns // TILES[name][1]) >= ENOUGH
    )
    return next(fitting, "32x64")


def unpack(rec: Recorder, w: Chunk, dtype: str, y: Slice, k: int, first: int) -> None:
    """y [.., k] of f32 or f16, from row `first` on, = the numbers of a chunk of weights."""
    per_row = k // unit(w.dtype)
    x, z = wide(-(-w.rows * per_row // 64))
    rec.dispatch(
        rec.kernel(f"dequantize.{w.dtype}.{dtype}"),
        reads=w.parts,
        writes=[y],
        push=struct.pack("<3I", first * per_row, w.rows * per_row, per_row),
        grid=(x, 1, z),
    )
