"""Which matrix products go to the matrix units, by which tile (gemm.slang), with weights decoded on the way or before."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hybrid.spec.dtypes import DTYPES
from kernels.vulkan.kernel import Kernel
from kernels.vulkan.memory import Slice
from kernels.vulkan.recorder import GridAxis, Live, Recorder
from kernels.vulkan.tensors import Chunk, DeviceTensor

# These repeat the shader's: rows and columns of a workgroup's tile by name, its subgroups' size, and the types that
# operands.slang decodes.
TILES = {"192x128": (192, 128), "96x128": (96, 128), "64x64": (64, 64), "32x64": (32, 64)}
SUBGROUP = 32
TYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_1", "q6_k")
ENOUGH = 96  # workgroups that keep a large device busy: with fewer, on the H200, the next smaller tile was faster
WIDE = 32768  # groups along x of a grid, as wide_group() of types.slang reads them back

Grid = tuple[GridAxis, GridAxis, GridAxis]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A kernel, the grid that covers the product with its tile (rows run fastest: see gemm.slang), and the weight."""

    kernel: Kernel
    grid: Grid
    weight: tuple[Slice, ...]


def wide(groups: int) -> tuple[int, int]:
    """Groups along x as (x, z) of a grid whose x axis is limited; kernels read them back with wide_group()."""
    return min(groups, WIDE), -(-groups // WIDE)


def unit(dtype: str) -> int:
    """Elements of a weight that one thread decodes at a time (UNIT of the type in types.slang)."""
    return 16 if DTYPES[dtype].quantised else 8


def gemm(rec: Recorder, family: str, x: DeviceTensor, w: Chunk, *, rows: int, extent: str, **constants: int) -> Gemm | None:
    """The kernel of a family (linear, ffn_up) for f16 rows of x, or None where the device or the types have none.

    Where the tuning says `unpack`, a dispatch before it writes the weight's numbers as f16 into scratch memory.
    """
    device, k = rec.device, x.shape[-1]
    if x.dtype != "f16" or w.dtype not in TYPES or not device.has("f16_matrices") or device.subgroup_size != SUBGROUP:
        return None
    default = {"tile": default_tile(rows, w.rows), "unpack": False}
    use = device.tuning.choose(f"{family}.gemm", default, w=w.dtype, rows=rows, n=w.rows, k=k)
    parts, dtype = w.parts, w.dtype
    if use["unpack"] and dtype != "f16" and 2 * w.rows * k <= device.max_range:
        scratch = rec.scratch(2 * w.rows * k)
        unpack(rec, w, "f16", scratch, k, first=0)
        parts, dtype = (scratch,), "f16"
    tall, across = TILES[use["tile"]]
    kernel = rec.kernel(f"{family}.gemm.{dtype}.{x.dtype}.{use['tile']}", **constants)
    return Gemm(kernel, (Live(extent, per=tall, cap=rows), -(-w.rows // across), 1), parts)


def default_tile(rows: int, columns: int) -> str:
    """The largest tile that the rows fill to half and of which there are enough, else the smallest."""
    fitting = (name for name, (tall, across) in TILES.items()
               if tall < 2 * rows and -(-rows // tall) * -(-columns // across) >= ENOUGH)
    return next(fitting, "32x64")


def unpack(rec: Recorder, w: Chunk, dtype: str, y: Slice, k: int, first: int) -> None:
    """y [.., k] of f32 or f16, from row `first` on, = the numbers of a chunk of weights."""
    per_row = k // unit(w.dtype)
    x, z = wide(-(-w.rows * per_row // 64))
    rec.dispatch(rec.kernel(f"dequantize.{w.dtype}.{dtype}"), reads=w.parts, writes=[y],
                 push=struct.pack("<2I", first * per_row, w.rows * per_row), grid=(x, 1, z))
