"""Recording matrix products: which kernel shape, one dispatch for each chunk of the weight, the push constants."""

from __future__ import annotations

import struct

from hybrid.spec.dtypes import DTYPES
from hybrid.spec.plan import CONTROL
from kernels.vulkan.memory import Slice
from kernels.vulkan.recorder import Live, Recorder
from kernels.vulkan.tensors import Chunk, DeviceTensor

# These numbers repeat the shaders' constants (gemv.slang, tile.slang, types.slang).
GEMV_TOKENS, GEMV_ROWS = 4, 4
GEMV_THREADS, GEMV_FFN_OUTS = 64, 32
TILE_TOKENS, TILE_ROWS, TILE_THREADS = 8, 4, 64
WIDE = 32768


def wide(groups: int) -> tuple[int, int]:
    """Groups along x as (x, z) of a grid whose x axis is limited; kernels read them back with wide_group()."""
    return min(groups, WIDE), -(-groups // WIDE)


def unit(dtype: str) -> int:
    """Elements of a weight that one thread decodes at a time (UNIT of the type in types.slang)."""
    return 16 if DTYPES[dtype].quantised else 8


def linear(rec: Recorder, x: DeviceTensor, w: DeviceTensor, y: Slice, *, rows: int, extent: str,
           out_rows: Slice | None = None, softcap: float = 0.0) -> None:
    """y f32 [rows, N] = x [.., K] @ w[N,K].T, softcapped where softcap > 0; row t of y reads row t, or out_rows[t],
    of x. `extent` names the live count of y's rows. Each chunk of w, which has a
    storage type of its own, fills its columns of y in a dispatch of its own."""
    gather = int(out_rows is not None)
    for chunk in w.chunks:
        if rows <= GEMV_TOKENS:
            kernel = rec.kernel(f"linear.gemv.{chunk.dtype}.{x.dtype}", SUBGROUP=rec.device.subgroup_size, GATHER=gather,
                                TOKENS=_tokens(rows))
            per = GEMV_THREADS // rec.device.subgroup_size * GEMV_ROWS
        else:
            kernel = rec.kernel(f"linear.tile.{chunk.dtype}.{x.dtype}", GATHER=gather)
            per = TILE_THREADS * TILE_ROWS
        push = _push(chunk.rows, w.shape[-1], chunk.row, w.shape[0], extent, rows, x.shape[0], softcap)
        # Without a gather the kernel does not read out_rows, but its binding must hold some buffer.
        reads = [*x.parts, *chunk.parts, x.parts[0] if out_rows is None else out_rows]
        rec.dispatch(kernel, reads=reads, writes=[y], push=push, grid=_grid(chunk.rows, per, rows, extent))


def ffn_up(rec: Recorder, x: DeviceTensor, w: Chunk, h: DeviceTensor, *, rows: int, extent: str) -> None:
    """h [rows, F] = gelu_tanh(x @ gate.T) * (x @ up.T) for one unsplit weight [2F, K]; h has the activation type of x."""
    f = w.rows // 2
    if rows <= GEMV_TOKENS:
        kernel = rec.kernel(f"ffn_up.gemv.{w.dtype}.{x.dtype}", SUBGROUP=rec.device.subgroup_size, TOKENS=_tokens(rows))
        per = GEMV_FFN_OUTS
    else:
        kernel = rec.kernel(f"ffn_up.tile.{w.dtype}.{x.dtype}")
        per = TILE_THREADS * TILE_ROWS // 2
    push = _push(f, x.shape[-1], 0, f, extent, rows, x.shape[0], 0.0)
    rec.dispatch(kernel, reads=[*x.parts, *w.parts], writes=h.parts, push=push, grid=_grid(f, per, rows, extent))


def geglu(rec: Recorder, gate_up: Slice, h: DeviceTensor, *, rows: int) -> None:
    """h [rows, F] = gelu_tanh(gate) * up of gate_up f32 [rows, 2F], in h's activation type."""
    f = h.shape[-1]
    rec.dispatch(rec.kernel(f"geglu.{h.dtype}"), reads=[gate_up], writes=h.parts, push=struct.pack("<2I", rows, f),
                 grid=(-(-f // 256), Live("rows", cap=rows), 1))


def _tokens(rows: int) -> int:
    """The gemv kernels are specialised for 1, 2 or 4 rows of x."""
    return 1 if rows == 1 else 2 if rows == 2 else 4


def _push(n: int, k: int, first: int, stride: int, extent: str, rows: int, x_rows: int, softcap: float) -> bytes:
    return struct.pack("<7If", n, k, first, stride, CONTROL[extent], rows, x_rows, softcap)


def _grid(n: int, per: int, rows: int, extent: str) -> tuple[int, int | Live, int]:
    x, z = wide(-(-n // per))
    return x, 1 if rows <= GEMV_TOKENS else Live(extent, per=TILE_TOKENS, cap=rows), z
