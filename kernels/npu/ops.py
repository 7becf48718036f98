"""Operations that have designs: lay out operands, choose a design by size, run jobs, assemble results.

Functions have the oracle's arguments and results; `npu.run` executes jobs. Rows are padded to whole
tiles. Weights are laid out once, into resident buffer objects; a run writes its rows of activations.
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
from hybrid.kernels.npu.resident import Resident
from hybrid.kernels.npu.tiles import tile_weights
from hybrid.kernels.npu.views import KeyViews
from hybrid.kernels.npu.xrt import Job
from hybrid.quant.codec import dequantise

# (m, k, n) of a core's tile: for small matrices, and for a model's.
TILES: dict[Weights, tuple[tuple[int, int, int], ...]] = {
    "i8": ((16, 32, 16), (64, 128, 64)),
    "q4_0": ((16, 64, 16), (32, 256, 64)),
    "q8_0": ((16, 32, 16), (32, 256, 32)),
}
COLUMNS = 4
STRIP = 1 << 16
"""Results that are scaled at a time."""


class Npu(Protocol):
    @property
    def views(self) -> KeyViews: ...

    def run(self, jobs: Sequence[Job]) -> None: ...

    def kept(self, source: np.ndarray, use: Any, make: Callable[[], np.ndarray], nbytes: int) -> Resident:
        """An operand in the NPU's order, uint8 of `nbytes` bytes, made once for as long as the array `source` stays.
        use: what it is made for, where one array has several uses."""
        ...

    def noted(self, source: np.ndarray, use: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Numbers of an operand that the host works with, made once likewise."""
        ...


def choose(T: int, K: int, N: int, weights: Weights, out: Literal["i32", "f32"]) -> Gemm:
    """Sizes of the design for a product, everything padded to whole tiles. How a core's tile cuts the weights follows
    from their size alone, so that they are kept once; few rows take a lower tile."""
    small, large = TILES[weights]
    m, k, n = large if large[1] <= K and COLUMNS * large[2] <= N else small
    m = m if ROWS * small[0] < T else small[0]
    up = lambda size, unit: -(-size // unit) * unit  # noqa: E731
    return Gemm(
        up(T, ROWS * m),
        up(K, k),
        up(N, COLUMNS * n),
        m,
        k,
        n,
        COLUMNS,
        s=16 if weights == "q4_0" else 8,
        weights=weights,
        out=out,
    )


def matmul_i8(npu: Npu, x: np.ndarray, w: np.ndarray, **_: Any) -> tuple[np.ndarray]:
    g = choose(x.shape[0], x.shape[1], len(w), "i8", "i32")
    out = np.empty((len(x), len(w)), np.int32)

    def take(c: np.ndarray) -> None:
        out[...] = c.reshape(g.M, g.N)[: len(x), : len(w)]

    _multiply(npu, g, x, w, lambda: tile_weights(padded(w, g.columns * g.n, g.k), g), take)
    return (out,)


def linear_rows(npu: Npu, x: np.ndarray, w: Any, **_: Any) -> tuple[np.ndarray]:
    """Activations are quantised by the host, weights once; the NPU's integers then meet both scales."""
    codes, scale = int8_rows(x)
    source = (w.parts if isinstance(w, Tensor) else (w,))[0]
    rows = w.shape[0]
    g = choose(len(x), x.shape[1], rows, "i8", "i32")
    across = npu.noted(source, "scales", lambda: int8_rows(dequantise(w, np.float32))[1])
    out = np.empty((len(x), rows), np.float32)

    def take(c: np.ndarray) -> None:
        """dots * scale * across, a few rows at a time, so that they are still in the processor's cache when they are
        scaled."""
        dots, step = c.reshape(g.M, g.N), max(1, STRIP // rows)
        for i in range(0, len(x), step):
            part = out[i : i + step]
            of = dots[i : i + len(part), :rows]
            np.multiply(of, scale[i : i + step, None], out=part, dtype=np.float32, casting="same_kind")
            part *= across

    _multiply(npu, g, codes, source, lambda: _as_codes(w, g), take)
    return (out,)


def _as_codes(w: Any, g: Gemm) -> np.ndarray:
    return tile_weights(padded(int8_rows(dequantise(w, np.float32))[0], g.columns * g.n, g.k), g)


def matmul_blocks(npu: Npu, x: np.ndarray, w: Tensor, **_: Any) -> tuple[np.ndarray]:
    g = choose(x.shape[0], x.shape[1], w.shape[0], "q4_0" if w.dtype == "q4_0" else "q8_0", "f32")
    out = np.empty((len(x), w.shape[0]), np.float32)

    def take(c: np.ndarray) -> None:
        out[...] = c.reshape(g.M, g.N)[: len(x), : w.shape[0]]

    _multiply(npu, g, x, w.parts[0], lambda: _stored(w, g), take)
    return (out,)


def _multiply(
    npu: Npu,
    g: Gemm,
    x: np.ndarray,
    source: np.ndarray,
    make: Callable[[], np.ndarray],
    take: Callable[[np.ndarray], None],
) -> None:
    """One run: rows of codes on weights that stay."""
    b = npu.kept(source, (g.weights, g.k, g.n), lambda: make().view(np.uint8).reshape(-1), weight_bytes(g))
    npu.run([Job(_gemm(g), {"A": padded(x, ROWS * g.m, g.k), "B": b}, {"C": take})])


def weight_bytes(g: Gemm) -> int:
    """Of B as the design reads it."""
    return g.columns * g.stripe_bytes


def _stored(w: Tensor, g: Gemm) -> np.ndarray:
    """The checkpoint's codes and scales in the design's order; nothing is rounded again."""
    codes = w.parts[0] if w.dtype == "q8_0" else _four_bits(w)
    return tile_weights(
        padded(codes, g.columns * g.n, g.k), g, padded(w.parts[1].astype(np.float32), g.columns * g.n, g.k // 32)
    )


def _four_bits(w: Tensor) -> np.ndarray:
    """q4_0: byte i of a block of 32 holds element i in its low half and i + 16 in the high one, each 8 too large."""
    packed = w.parts[0].reshape(w.shape[0], -1, 16)
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8).reshape(w.shape) - np.int8(8)
    return codes


def norm_of(t: int, h: int) -> Norm:
    """Sizes of the design for `t` rows."""
    rows = 1 if t <= CORES * COLUMNS else 8
    return Norm(-(-t // (CORES * COLUMNS * rows)) * CORES * COLUMNS * rows, h, rows, COLUMNS)


def rmsnorm(npu: Npu, x: np.ndarray, w: np.ndarray, eps: float, **_: Any) -> tuple[np.ndarray]:
    t, h = x.shape
    n = norm_of(t, h)
    y = np.empty((n.T, h), np.uint16)
    npu.run([Job(_norm(n, float(eps)), {"x": bf16(padded(x, n.T, 1)), "w": two_parts(w)}, {"y": y})])
    return (real(y[:t]),)


# Designs are compared and hashed on every run: the same one is kept.
_gemm: Callable[[Gemm], Design] = lru_cache(maxsize=256)(lambda g: gemm_i8(g) if g.weights == "i8" else gemm_blocks(g))
_norm: Callable[[Norm, float], Design] = lru_cache(maxsize=64)(rmsnorm_bf16)

OPS: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    f.__name__: f for f in (linear_rows, matmul_i8, matmul_blocks, rmsnorm, attention, attention_i8)
}
