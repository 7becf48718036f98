"""The operations that have designs: operands dealt out, a design chosen by size, jobs run, results put together.

Functions take what the oracle's take and return what they return; `npu.run` executes jobs. Rows are padded to whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.kernels.npu.attend import attention, attention_i8
from hybrid.kernels.npu.design import Design
from hybrid.kernels.npu.designs import gemm_blocks, gemm_i8, rmsnorm_bf16
from hybrid.kernels.npu.designs.gemm import ROWS, Gemm, Weights
from hybrid.kernels.npu.designs.rmsnorm import CORES, Norm
from hybrid.kernels.npu.layout import bf16, int8_rows, padded, real, two_parts
from hybrid.kernels.npu.tiles import tile_weights
from hybrid.kernels.npu.xrt import Job
from hybrid.quant.codec import dequantise

# (m, k, n) of a core's tile: for few rows or columns, and for prefill.
TILES: dict[Weights, tuple[tuple[int, int, int], ...]] = {
    "i8": ((16, 32, 16), (64, 128, 64)),
    "q4_0": ((16, 64, 16), (32, 256, 64)),
    "q8_0": ((16, 32, 16), (32, 256, 32)),
}
COLUMNS = 4


class Npu(Protocol):
    def run(self, jobs: Sequence[Job]) -> None: ...

    def kept(self, key: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An operand in the NPU's order, made once for as long as its tensor stays."""
        ...


def choose(T: int, K: int, N: int, weights: Weights, out: Literal["i32", "f32"]) -> Gemm:
    """Sizes of the design for a product, everything padded to whole tiles."""
    small, large = TILES[weights]
    m, k, n = large if ROWS * small[0] < T and large[1] <= K and COLUMNS * large[2] <= N else small
    up = lambda size, unit: -(-size // unit) * unit  # noqa: E731
    return Gemm(
        up(T, ROWS * m), up(K, k), up(N, COLUMNS * n), m, k, n, COLUMNS, s=16 if weights == "q4_0" else 8, weights=weights, out=out
    )


def matmul_i8(npu: Npu, x: np.ndarray, w: np.ndarray, **_: Any) -> tuple[np.ndarray]:
    g = choose(x.shape[0], x.shape[1], len(w), "i8", "i32")
    b = npu.kept((id_of(w), g.k, g.n), lambda: tile_weights(padded(w, g.columns * g.n, g.k), g))
    out = np.empty((g.M, g.N), np.int32)
    npu.run([Job(_gemm(g), {"A": padded(x, ROWS * g.m, g.k), "B": b}, {"C": out})])
    return (out[: len(x), : len(w)],)


def linear_rows(npu: Npu, x: np.ndarray, w: Any, **_: Any) -> tuple[np.ndarray]:
    """Activations are quantised by the host, weights once; the NPU's integers then meet both scales."""
    codes, scale = int8_rows(x)
    parts = w.parts if isinstance(w, Tensor) else (w,)
    key = (id_of(parts[0]), "rows")
    weights = npu.kept((*key, "codes"), lambda: int8_rows(dequantise(w, np.float32))[0])
    across = npu.kept((*key, "scales"), lambda: int8_rows(dequantise(w, np.float32))[1])
    (dots,) = matmul_i8(npu, codes, weights)
    return (dots.astype(np.float32) * scale[:, None] * across,)


def matmul_blocks(npu: Npu, x: np.ndarray, w: Tensor, **_: Any) -> tuple[np.ndarray]:
    g = choose(x.shape[0], x.shape[1], w.shape[0], "q4_0" if w.dtype == "q4_0" else "q8_0", "f32")
    b = npu.kept((id_of(w.parts[0]), g.k, g.n), lambda: _stored(w, g))
    out = np.empty((g.M, g.N), np.float32)
    npu.run([Job(_gemm(g), {"A": padded(x, ROWS * g.m, g.k), "B": b}, {"C": out})])
    return (out[: len(x), : w.shape[0]],)


def _stored(w: Tensor, g: Gemm) -> np.ndarray:
    """The checkpoint's codes and scales in the design's order; nothing is rounded again."""
    codes = w.parts[0] if w.dtype == "q8_0" else _four_bits(w)
    return tile_weights(padded(codes, g.columns * g.n, g.k), g, padded(w.parts[1].astype(np.float32), g.columns * g.n, g.k // 32))


def _four_bits(w: Tensor) -> np.ndarray:
    """q4_0: byte i of a block of 32 holds element i in its low half and i + 16 in the high one, each 8 too large."""
    packed = w.parts[0].reshape(w.shape[0], -1, 16)
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8).reshape(w.shape) - np.int8(8)
    return codes


def rmsnorm(npu: Npu, x: np.ndarray, w: np.ndarray, eps: float, **_: Any) -> tuple[np.ndarray]:
    t, h = x.shape
    rows = 1 if t <= CORES * COLUMNS else 8
    n = Norm(-(-t // (CORES * COLUMNS * rows)) * CORES * COLUMNS * rows, h, rows, COLUMNS)
    y = np.empty((n.T, h), np.uint16)
    npu.run([Job(_norm(n, float(eps)), {"x": bf16(padded(x, n.T, 1)), "w": two_parts(w)}, {"y": y})])
    return (real(y[:t]),)


def id_of(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    return array.ctypes.data, array.shape


# Designs are compared and hashed on every run: the same one is kept.
_gemm: Callable[[Gemm], Design] = lru_cache(maxsize=256)(lambda g: gemm_i8(g) if g.weights == "i8" else gemm_blocks(g))
_norm: Callable[[Norm, float], Design] = lru_cache(maxsize=64)(rmsnorm_bf16)

OPS: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    f.__name__: f for f in (linear_rows, matmul_i8, matmul_blocks, rmsnorm, attention, attention_i8)
}
