"""The designs that are checked, emitted, built and captured by name: the shapes of real models, and small ones for
tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from hybrid.core.errors import nearest
from hybrid.kernels.npu.design import STACK, Design, Kernel
from hybrid.kernels.npu.designs.attention import CORES, Attention, Scores, attention
from hybrid.kernels.npu.designs.gemm import Gemm, gemm
from hybrid.kernels.npu.designs.rmsnorm import Norm, rmsnorm
from hybrid.kernels.npu.objects import tile_kernel as catalogued

Maker = Callable[[], Design]
TABLES = 4096  # bytes of the exponential's tables (aie/exp2_table.h)


def tile_kernel(name: str, static_bytes: int = 0, **macros: Any) -> Kernel:
    return catalogued(name, static_bytes, STACK, **macros)


def gemm_i8(g: Gemm) -> Design:
    """INT8 product; requantised to int8 in the core where g.out is i8."""
    tile = {"DIM_M": g.m, "DIM_K": g.k, "DIM_N": g.n}
    requantise = tile_kernel("gemm_i8_requant", **tile) if g.out == "i8" else None
    return gemm(g, tile_kernel("gemm_i8_zero", **tile), tile_kernel("gemm_i8", **tile), requantise, f"gemm_i8_{g.out}")


def gemm_blocks(g: Gemm) -> Design:
    """INT8 activations on weights with a scale for every 32 (q4_0, q8_0); float32 results."""
    tile, stem = {"DIM_M": g.m, "DIM_K": g.k, "DIM_N": g.n}, {"q4_0": "gemm_i8i4", "q8_0": "gemm_i8q8"}[g.weights]
    return gemm(g, tile_kernel(f"{stem}_stream_zero", **tile), tile_kernel(f"{stem}_stream", **tile), name=stem)


def rmsnorm_bf16(n: Norm, eps: float = 1e-6) -> Design:
    return rmsnorm(n, tile_kernel("rmsnorm", ROWS=1, DIM_H=n.H, EPS=eps))


def flash_attention(a: Attention) -> Design:
    """Queries come scaled, so that one kernel serves every scale. The exponential's tables take 4 KB of each core."""
    macros: dict[str, Any] = {"LQ": a.LQ, "LK": a.LK, "DIM_D": a.D, "GROUP": a.group, "SCALE": 1.0}
    stem = "attention_stream" if a.scores == "bf16" else "attention_i8_stream"
    start, tile, finish = (
        tile_kernel(f"{stem}_{part}", static_bytes=TABLES, **macros) for part in ("start", "tile", "finish")
    )
    return attention(a, start, tile, finish)


def causal(a: Attention) -> Attention:
    """With the spans of a prompt's first rows: as many as the query tiles hold, each seeing itself and what is before
    it."""
    rows = CORES * a.LQ // a.group  # of a block
    return replace(a, spans=tuple((0, min(a.tiles, -(-(b + 1) * rows // a.LK))) for b in range(a.blocks)))


def chosen(names: Sequence[str]) -> dict[str, Maker]:
    """The makers of those names, of all for none. ValueError for a name that is not shipped."""
    known = shipped()
    if unknown := [n for n in names if n not in known]:
        raise ValueError(f"no design {unknown[0]!r}{nearest(unknown[0], known)}")
    return {n: known[n] for n in names or known}


@lru_cache(maxsize=1)
def shipped() -> dict[str, Maker]:
    """Makers by name. Sizes of the models: specs/models; E2B's matrices are Gemma 3n E2B's (hidden 2048, ffn 8192)."""
    found: dict[str, Maker] = {}
    for model, hidden, q, kv, ffn in (("27b", 5376, 4096, 2048, 21504), ("e2b", 2048, 2048, 512, 8192)):
        for part, k, n in (
            ("qkv", hidden, q + 2 * kv),
            ("out", q, hidden),
            ("gate_up", hidden, 2 * ffn),
            ("down", ffn, hidden),
        ):
            found[f"{model}.{part}.i8"] = partial(gemm_i8, Gemm(512, k, n, 64, 128, 64, 4))
            found[f"{model}.{part}.q4_0"] = partial(
                gemm_blocks, Gemm(512, k, n, 32, 256, 64, 4, s=16, weights="q4_0", out="f32")
            )
            found[f"{model}.{part}.q8_0"] = partial(
                gemm_blocks, Gemm(512, k, n, 32, 256, 32, 4, weights="q8_0", out="f32")
            )
        found[f"{model}.norm"] = partial(rmsnorm_bf16, Norm(512, hidden))
    kinds: tuple[tuple[Scores, str], ...] = (("bf16", ""), ("i8", ".i8"))
    for scores, suffix in kinds:
        for model, a in (
            ("27b", Attention(16, 8, 16, 128, 32, 32, 2)),
            ("e2b", Attention(2, 32, 32, 256, 16, 16, 4, 2)),
        ):
            found[f"{model}.attention{suffix}"] = partial(flash_attention, causal(replace(a, scores=scores)))
        found[f"small.attention{suffix}"] = partial(
            flash_attention, Attention(2, 1, 2, 32, 32, 32, 2, 2, scores=scores)
        )
    for columns in (1, 2, 3, 4):
        found[f"small.i8.c{columns}"] = partial(gemm_i8, Gemm(64, 64, 32 * columns, 16, 32, 16, columns))
    found["small.q4_0"] = partial(gemm_blocks, Gemm(64, 128, 64, 16, 64, 16, 4, s=16, weights="q4_0", out="f32"))
    found["small.q8_0"] = partial(gemm_blocks, Gemm(64, 128, 64, 16, 32, 16, 4, weights="q8_0", out="f32"))
    found["small.norm"] = partial(rmsnorm_bf16, Norm(16, 64, 1))
    found["small.i8.requant"] = partial(gemm_i8, Gemm(64, 64, 64, 16, 32, 16, 4, out="i8", shift=9))
    return found
