"""Matrix products and conversions between storage types."""

from __future__ import annotations

import numpy as np

from hybrid.spec.tensor import Tensor
from kernels.oracle.quant import BLOCK, Real, Value, dequantise, row_blocks, rows, take

_SCRATCH = 1 << 22  # elements of a weight dequantised at once


def linear(*, x: Value, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[T,N] = x[T,K] @ w[N,K].T.

    A q8_act `x` in float64 goes through exact integer dots per 32 (the definition); in float32 its dequantised
    values go through BLAS, which equals that up to float rounding. A float32 `w` is used as it is, any other is
    dequantised in blocks of rows into one scratch."""
    if real is np.float64 and isinstance(x, Tensor) and isinstance(w, Tensor) and x.type.quantised and w.type.quantised:
        return (_integer_linear(x, w),)
    a = dequantise(x, real)
    if isinstance(w, np.ndarray) and w.dtype == real:
        return (a @ w.T,)
    n, k = w.shape
    y = np.empty((len(a), n), real)
    scratch = np.empty((min(n, max(1, _SCRATCH // k)), k), real)
    for i, j in row_blocks(n, k, _SCRATCH):
        np.matmul(a, dequantise(rows(w, i, j), real, out=scratch[: j - i]).T, out=y[:, i:j])
    return (y,)


def fused_qkv(*, x: Value, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """qkv[T,(HQ+2*HK)*D] = x[T,H] @ w.T: the rows of q, then of k, then of v."""
    return linear(x=x, w=w, real=real)


def logits(
    *, x: Value, w: Value, out_rows: np.ndarray, softcap: float, real: Real = np.float64
) -> tuple[np.ndarray]:
    """logits[O,V] = x[out_rows[O]] @ w[V,H].T, then softcap * tanh(. / softcap) if softcap > 0."""
    (y,) = linear(x=take(x, out_rows), w=w, real=real)
    return (real(softcap) * np.tanh(y / real(softcap)) if softcap > 0 else y,)


def dequantize(*, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[N,K] = the numbers of w."""
    return (dequantise(w, real),)


def quantize_act(*, x: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[T,K] = x; the rounding to q8_act is the encoding of the output."""
    return (x.astype(real, copy=False),)


def integer_dots(x: Tensor, w: Tensor) -> np.ndarray:
    """int32 [T, N, K/32]: for each block of 32 the dot of x's int8 codes (q8_act [T,K]) with w's codes (q8_0 [N,K])
    or unsigned nibbles (q4_0). Uses float32 products: no sum exceeds 32 * 128 * 128 < 2**24, so they are exact."""
    if x.dtype != "q8_act" or w.dtype not in ("q8_0", "q4_0") or x.shape[-1] != w.shape[-1]:
        got = f"{x.dtype} {x.shape}, {w.dtype} {w.shape}"
        raise TypeError(f"integer dots need q8_act [T,K] and q8_0 or q4_0 [N,K], got {got}")
    (t, k), n = x.shape, w.shape[0]
    codes = w.parts[0].reshape(n, k // BLOCK, -1)
    if w.dtype == "q4_0":
        codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    a = np.ascontiguousarray(x.parts[0].reshape(t, -1, BLOCK).swapaxes(0, 1), np.float32)
    b = np.ascontiguousarray(codes.swapaxes(0, 1), np.float32)
    return np.matmul(a, b.swapaxes(1, 2)).astype(np.int32).transpose(1, 2, 0)


def _integer_linear(x: Tensor, w: Tensor) -> np.ndarray:
    """Sum over blocks of d_w * (scale_x * dot), or for q4_0 d_w * (scale_x * dot - 8 * scaled_sum_x), in float64."""
    (t, k), n = x.shape, w.shape[0]
    scale, scaled_sum = np.moveaxis(x.parts[1].astype(np.float64).reshape(t, 1, k // BLOCK, 2), -1, 0)
    y = np.empty((t, n))
    for i, j in row_blocks(n, t * k // BLOCK + k):
        block = w.rows(i, j)
        terms = integer_dots(x, block) * scale
        if w.dtype == "q4_0":
            terms -= 8 * scaled_sum
        y[:, i:j] = np.einsum("tnb,nb->tn", terms, block.parts[1].astype(np.float64))
    return y
