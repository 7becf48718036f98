"""Recording matrix products: choice of the kernel, one dispatch per chunk of the weight, push constants."""

from __future__ import annotations

import struct
from statistics import NormalDist

from hybrid.core.plan import CONTROL
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.ops._gemm import Grid, gemm, kept_splits, unit, wide
from hybrid.kernels.vulkan.ops.rmsnorm import workgroup
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor

# As in the shaders (gemv.slang, tile.slang, types.slang).
GEMV_TOKENS, GEMV_ROWS, GEMV_FFN_OUTS = 4, 4, 32
TILE_TOKENS, TILE_ROWS, TILE_THREADS = 8, 4, 64
NOTHING: tuple[Slice, ...] = ()
FFN_BANDS = 2 * GEMV_FFN_OUTS // GEMV_ROWS


def linear(
    rec: Recorder,
    x: DeviceTensor,
    w: DeviceTensor,
    y: Slice,
    *,
    rows: int,
    extent: str,
    out_rows: Slice | None = None,
    softcap: float = 0.0,
    partials: int = 0,
) -> None:
    """y f32 [rows, N] = x [.., K] @ w[N,K].T, softcapped where softcap > 0.

    Row t of y reads row t, or out_rows[t], of x. `extent` names the live count of y's rows. Each chunk of w, with its
    own
    storage type, writes its columns of y in a separate dispatch. `partials`: number of kept partials
    (kept_partials() of the same product); y then has that many times its rows."""
    gather = int(out_rows is not None)
    for chunk in w.chunks:
        parts, beside, more = chunk.parts, NOTHING, b""
        few = _few(rec, x, chunk, rows)
        made = (
            None
            if few
            else gemm(rec, "linear", x, chunk, y, rows=rows, extent=extent, partials=partials, GATHER=gather)
        )
        if made:
            kernel, grid, parts, beside, more = made.kernel, made.grid, made.weight, made.beside, made.push
        elif few or rows <= GEMV_TOKENS:
            use = gemv(rec, "linear", chunk.dtype, x.dtype, rows, chunk.rows, w.shape[-1])
            kernel = rec.kernel(f"linear.gemv.{chunk.dtype}.{x.dtype}", GATHER=gather, **use)
            per = use["THREADS"] // use["SUBGROUP"] // use["SPLIT"] * GEMV_ROWS
            grid = _grid(chunk.rows, per, rows, extent, use["TOKENS"])
        else:
            kernel = rec.kernel(f"linear.tile.{chunk.dtype}.{x.dtype}", GATHER=gather)
            grid = _grid(chunk.rows, TILE_THREADS * TILE_ROWS, rows, extent, TILE_TOKENS)
        push = _push(chunk.rows, w.shape[-1], chunk.row, w.shape[0], extent, rows, x.shape[0], softcap)
        # Without a gather the kernel does not read out_rows, but its binding needs some buffer.
        reads = [*x.parts, *parts, x.parts[0] if out_rows is None else out_rows]
        rec.dispatch(kernel, reads=reads, writes=[y, *beside], push=push + more, grid=grid)


def kept_partials(rec: Recorder, x: DeviceTensor, w: DeviceTensor, *, rows: int) -> int:
    """Number of partials that `linear` may keep for the product's reader (kept_splits()); 0: none."""
    alone = len(w.chunks) == 1 and not _few(rec, x, w.chunks[0], rows)
    return kept_splits(rec, x, w.chunks[0], rows=rows) if alone else 0


def _few(rec: Recorder, x: DeviceTensor, w: Chunk, rows: int) -> bool:
    """Whether gemv.slang takes the product, four rows at a time, in place of tiles and matrix units."""
    n, k = w.rows, x.shape[-1]
    return _takes_gemv(rec, "linear", w.dtype, x.dtype, rows, n, k) or _few_tiles(rec, w.dtype, x.dtype, rows, n, k)


def ffn_up(rec: Recorder, x: DeviceTensor, w: Chunk, h: DeviceTensor, *, rows: int, extent: str) -> None:
    """h [rows, F] = gelu_tanh(x @ gate.T) * (x @ up.T) for one unsplit weight [2F, K]. h has the activation type of
    x."""
    f, parts, beside, more = w.rows // 2, w.parts, NOTHING, b""
    k = x.shape[-1]
    few = _takes_gemv(rec, "ffn_up", w.dtype, x.dtype, rows, f, k) or _few_tiles(rec, w.dtype, x.dtype, rows, 2 * f, k)
    made = None if few else gemm(rec, "ffn_up", x, w, h.parts[0], rows=rows, extent=extent)
    if made:
        kernel, grid, parts, beside, more = made.kernel, made.grid, made.weight, made.beside, made.push
    elif few or rows <= GEMV_TOKENS:
        use = gemv(rec, "ffn_up", w.dtype, x.dtype, rows, f, k)
        kernel = rec.kernel(f"ffn_up.gemv.{w.dtype}.{x.dtype}", **use)
        grid = _grid(f, GEMV_FFN_OUTS, rows, extent, use["TOKENS"])
    else:
        kernel = rec.kernel(f"ffn_up.tile.{w.dtype}.{x.dtype}")
        grid = _grid(f, TILE_THREADS * TILE_ROWS // 2, rows, extent, TILE_TOKENS)
    push = _push(f, k, 0, f, extent, rows, x.shape[0], 0.0)
    reads = [*x.parts, *parts, x.parts[0]]  # as in linear()
    rec.dispatch(kernel, reads, writes=[*h.parts, *beside], push=push + more, grid=grid)


def geglu(
    rec: Recorder, gate_up: Slice, h: DeviceTensor, *, rows: int, extent: str = "rows", sparsity: float = 0.0
) -> None:
    """h [rows, F] = gelu_tanh(gate) * up of gate_up f32 [rows, 2F], in h's activation type. `sparsity`: share of a
    row's gates, the smallest ones, that count as 0."""
    f, live = h.shape[-1], Live(extent, cap=rows)
    if sparsity > 0:
        kernel = rec.kernel(
            f"sparse_geglu.{h.dtype}.{workgroup(f, rec.device.max_threads)}", SUBGROUP=rec.device.subgroup_size
        )
        push = struct.pack("<3If", CONTROL[extent], rows, f, NormalDist().inv_cdf(sparsity))
        rec.dispatch(kernel, reads=[gate_up], writes=h.parts, push=push, grid=(live,))
        return
    rec.dispatch(
        rec.kernel(f"geglu.{h.dtype}"),
        reads=[gate_up],
        writes=h.parts,
        push=struct.pack("<3I", CONTROL[extent], rows, f),
        grid=(-(-f // 256), live, 1),
    )


def gemv(rec: Recorder, family: str, w: str, x: str, rows: int, n: int, k: int) -> dict[str, int]:
    """Constants of gemv.slang for `rows` rows of x (type x), at most four at a time, by w [n, k] of type w. `family`:
    linear or ffn_up."""
    device, use = rec.device, _gemv_use(rec, family, w, x, rows, n, k)
    pieces, subgroup = k // (32 if x == "q8_act" else unit(w)), device.subgroup_size
    # Subgroups per row, so that a lane takes `steps` pieces of it; steps 0: one subgroup.
    most = device.max_threads // subgroup
    split = min(-(-pieces // (use["steps"] * subgroup)), most) if use["steps"] else 1
    groups, passes = min(use["groups"], most // split), 1
    if family == "ffn_up":  # a workgroup makes 32 outputs, from as many rows of gate and of up, in bands
        groups = max(g for g in (1, 2, 4, 8, 16) if g <= (groups if use["steps"] else most))
        passes = FFN_BANDS // groups
    steps = -(-pieces // (split * subgroup)) if use["steps"] else 0
    return {
        "SUBGROUP": subgroup,
        "TOKENS": tokens(rows),
        "THREADS": groups * split * subgroup,
        "SPLIT": split,
        "PASSES": passes,
        "STEPS": steps,
    }


def _gemv_use(rec: Recorder, family: str, w: str, x: str, rows: int, n: int, k: int) -> dict[str, int]:
    lanes = {"steps": 1, "groups": 4} if rec.device.subgroup_size >= 32 else {"steps": 0, "groups": 8}
    default = {**lanes, "most": GEMV_TOKENS}
    return rec.device.tuning.choose(f"{family}.gemv", default, w=w, x=x, rows=rows, n=n, k=k)


def _takes_gemv(rec: Recorder, family: str, w: str, x: str, rows: int, n: int, k: int) -> bool:
    """Whether gemv.slang takes so few rows before matrix units are considered."""
    return rows <= GEMV_TOKENS and rows <= _gemv_use(rec, family, w, x, rows, n, k)["most"]


def _few_tiles(rec: Recorder, w: str, x: str, rows: int, n: int, k: int) -> bool:
    """Whether a product's tiles leave most of the device idle. With few outputs, one thread's pass over K takes longer
    than rereading the matrix for every four rows across the device."""
    use = rec.device.tuning.choose("linear.tile", {"least": 0}, w=w, x=x, rows=rows, n=n, k=k)
    return -(-n // (TILE_THREADS * TILE_ROWS)) * -(-rows // TILE_TOKENS) < use["least"]


def tokens(rows: int) -> int:
    """Rows of x that a gemv kernel is specialised for: 1, 2 or 4."""
    return 1 if rows == 1 else 2 if rows == 2 else 4


def _push(n: int, k: int, first: int, stride: int, extent: str, rows: int, x_rows: int, softcap: float) -> bytes:
    return struct.pack("<7If", n, k, first, stride, CONTROL[extent], rows, x_rows, softcap)


def _grid(n: int, per: int, rows: int, extent: str, tall: int) -> Grid:
    """Workgroups of `per` outputs by `tall` live rows."""
    across, further = wide(-(-n // per))
    return across, 1 if rows <= tall else Live(extent, per=tall, cap=rows), further
