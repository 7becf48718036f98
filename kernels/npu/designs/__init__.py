"""The designs that are checked, emitted, built and captured by name: the shapes of real models, and small ones for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from kernels.npu.design import Design
from kernels.npu.designs.gemm import Gemm, gemm
from kernels.npu.objects import tile_kernel

Maker = Callable[[], Design]


def gemm_i8(g: Gemm) -> Design:
    """INT8 product; requantised to int8 in the core where g.out is i8."""
    tile = {"DIM_M": g.m, "DIM_K": g.k, "DIM_N": g.n}
    requantise = tile_kernel("gemm_i8_requant", **tile) if g.out == "i8" else None
    return gemm(g, tile_kernel("gemm_i8_zero", **tile), tile_kernel("gemm_i8", **tile), requantise, f"gemm_i8_{g.out}")


@lru_cache(maxsize=1)
def shipped() -> dict[str, Maker]:
    """Makers by name. Sizes of the models: specs/models; E2B's matrices are Gemma 3n E2B's (hidden 2048, ffn 8192)."""
    found: dict[str, Maker] = {}
    for model, hidden, q, kv, ffn in (("27b", 5376, 4096, 2048, 21504), ("e2b", 2048, 2048, 512, 8192)):
        for part, k, n in (("qkv", hidden, q + 2 * kv), ("out", q, hidden), ("gate_up", hidden, 2 * ffn), ("down", ffn, hidden)):
            found[f"{model}.{part}.i8"] = partial(gemm_i8, Gemm(512, k, n, 64, 128, 64, 4))
    for columns in (1, 2, 4):
        found[f"small.i8.c{columns}"] = partial(gemm_i8, Gemm(64, 64, 32 * columns, 16, 32, 16, columns))
    found["small.i8.requant"] = partial(gemm_i8, Gemm(64, 64, 64, 16, 32, 16, 4, out="i8", shift=9))
    return found
