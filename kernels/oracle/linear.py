"""Matrix products and conversions between storage types."""

from __future__ import annotations

import numpy as np
from numpy import matmul

from hybrid.core.dtypes import QUANTISED_TYPES
from hybrid.core.tensor import Tensor
from hybrid.kernels.host.nbits import Product, exact_for
from hybrid.quant.blocks import factors, integers
from hybrid.quant.codec import BLOCK, Real, Value, dequantise, row_blocks, rows, take

_SCRATCH = 1 << 22  # elements of a weight dequantised at once


def linear(*, x: Value, w: Value | Product, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[T,N] = x[T,K] @ w[N,K].T.

    A q8_act `x` in float64 goes through exact integer dots per 32 (the definition); in float32 its dequantised
    values go through BLAS, which equals that up to float rounding. A float32 `w` is used as it is, any other is
    dequantised in blocks of rows into one scratch. Beside a float16 `x` the numbers of `w` are rounded to float16: that
    is what matrix units multiply, and every device takes them so. A Product computes the exact integer dots itself."""
    if isinstance(w, Product):
        if isinstance(x, Tensor) and x.dtype == "q8_act" and exact_for(x):
            return (w(x),)
        w = w.source
    if real is np.float64 and isinstance(x, Tensor) and isinstance(w, Tensor) and x.type.quantised and w.type.quantised:
        return (_integer_linear(x, w),)
    a, half = dequantise(x, real), isinstance(x, np.ndarray) and x.dtype == np.float16
    if isinstance(w, np.ndarray) and w.dtype == real and not half:
        return (matmul(a, w.T),)
    n, k = w.shape
    y = np.empty((len(a), n), real)
    scratch = np.empty((min(n, max(1, _SCRATCH // k)), k), real)
    for i, j in row_blocks(n, k, _SCRATCH):
        block = rows(w, i, j)
        if half:
            scratch[: j - i] = dequantise(block, np.float32).astype(np.float16)
        else:
            dequantise(block, real, out=scratch[: j - i])
        matmul(a, scratch[: j - i].T, out=y[:, i:j])
    return (y,)


def fused_qkv(*, x: Value, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """qkv[T,(HQ+2*HK)*D] = x[T,H] @ w.T: the rows of q, then of k, then of v."""
    return linear(x=x, w=w, real=real)


def logits(*, x: Value, w: Value, out_rows: np.ndarray, softcap: float, real: Real = np.float64) -> tuple[np.ndarray]:
    """logits[O,V] = x[out_rows[O]] @ w[V,H].T, then softcap * tanh(. / softcap) if softcap > 0."""
    (y,) = linear(x=take(x, out_rows), w=w, real=real)
    return (real(softcap) * np.tanh(y / real(softcap)) if softcap > 0 else y,)


def dequantize(*, w: Value, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[N,K] = w dequantised."""
    return (dequantise(w, real),)


def quantize_act(*, x: np.ndarray, real: Real = np.float64) -> tuple[np.ndarray]:
    """y[T,K] = x; the rounding to q8_act or f16 is the encoding of the output."""
    return (x.astype(real, copy=False),)


def integer_dots(x: Tensor, w: Tensor) -> np.ndarray:
    """int32 [T, N, groups]: for each group of elements that share a scale (DType.group) the dot
    of x's int8 codes (q8_act [T,K]) with w's integers [N,K] (hybrid.quant.blocks; of q4_0 the nibbles, unsigned).
    Uses float32 products: no sum exceeds 32 * 128 * 128 < 2**24, so they are exact."""
    if x.dtype != "q8_act" or w.dtype not in QUANTISED_TYPES or x.shape[-1] != w.shape[-1]:
        got = f"{x.dtype} {x.shape}, {w.dtype} {w.shape}"
        raise TypeError(f"integer dots need q8_act [T,K] and quantised [N,K], got {got}")
    (t, k), n = x.shape, w.shape[0]
    group = w.type.group
    codes = integers(w.dtype, _blocks(w)).reshape(n, k // group, group)
    if w.dtype == "q4_0":
        codes = codes + np.int8(8)
    a = np.ascontiguousarray(x.parts[0].reshape(t, -1, group).swapaxes(0, 1), np.float32)
    b = np.ascontiguousarray(codes.swapaxes(0, 1), np.float32)
    return matmul(a, b.swapaxes(1, 2)).astype(np.int32).transpose(1, 2, 0)


def _blocks(w: Tensor) -> list[np.ndarray]:
    count = int(np.prod(w.shape)) // w.type.block
    return [p.reshape(count, -1) for p in w.parts]


def _integer_linear(x: Tensor, w: Tensor) -> np.ndarray:
    """Sum over groups of scale_w * (scale_x * dot) + minimum_w * scaled_sum_x, in float64; q4_0's offset is a minimum
    of -8 * scale_w."""
    (t, k), n = x.shape, w.shape[0]
    scale_x, scaled_sum = np.moveaxis(x.parts[1].astype(np.float64).reshape(t, k // BLOCK, 2), -1, 0)
    y = np.empty((t, n))
    for i, j in row_blocks(n, t * k // BLOCK + k):
        block = w.rows(i, j)
        dots = integer_dots(x, block)
        scale, minimum = factors(w.dtype, _blocks(block), np.float64)
        scale = scale.reshape(j - i, -1)
        if w.dtype == "q4_0":
            minimum = -8 * scale
        each = np.repeat(scale_x, dots.shape[-1] // scale_x.shape[-1], axis=1)
        y[:, i:j] = np.einsum("tng,tg,ng->tn", dots, each, scale, optimize=True)
        if minimum is not None:
            sums = scaled_sum
            if w.type.group < BLOCK:  # the activation's sums are of whole blocks
                sums = each * x.parts[0].reshape(t, -1, w.type.group).sum(axis=-1)
            y[:, i:j] += sums @ minimum.reshape(j - i, -1).T
    return y
